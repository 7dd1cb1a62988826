"""The papers' experiments, run on the packages beside this one, with the published figures beside ours."""
