"""A replica that spans several processes: stages of layers, and several workers that share a stage's requests.

    wire.py       frames over TCP, with deadlines and a shared secret
    messages.py   what is said
    batches.py    how a step is cut into micro-batches, and who computes which part
    serving.py    a worker's door;  worker.py: what it does;  inputs.py: what came from the stage before
    remote.py     the driver's side of one worker: asking it, noticing that it is gone
    spawn.py      workers as processes of this machine
    launch.py     from a description of stages to a running pipeline
    driver.py     PipelineExecutor: all workers as one executor for the engine's loop;  under_way.py: one step

A request gets one worker in each stage, by weighted round robin, and keeps them: its cache is there. The driver holds
the same tables of rows and blocks as each worker does and makes the same changes to them, so it knows what there is
room for without asking. Hidden states go from worker to worker; sampled tokens come back to the driver, which puts
them into the next step.
"""
