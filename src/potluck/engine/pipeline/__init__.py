"""A replica that spans several processes: stages of layers, and several workers that share a stage's requests.

    pipeline_connection.py   frames over TCP, with deadlines and a shared secret;  pipeline_messages.py: what is said
    worker.py                a worker: its port, what it does, what came from the stage before
    remote_worker.py         the driver's side of one worker: starting it, asking it, noticing that it is gone
    pipeline_executor.py     all workers as one executor for the engine's loop; one step, cut into micro-batches
    launch.py                from a description of stages to a running pipeline

A request gets one worker in each stage, by weighted round robin, and keeps them: its cache is there. The driver holds
the same tables of rows and blocks as each worker does and makes the same changes to them, so it knows what there is
room for without asking. Hidden states go from worker to worker; sampled tokens come back to the driver, which puts
them into the next step.
"""
