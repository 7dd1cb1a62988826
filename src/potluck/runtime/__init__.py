"""What the simulator and the gateway both stand on: a plan with what its names mean, and a log that replays."""
