"""The model: what a checkpoint says and holds, and the layers that compute it."""
