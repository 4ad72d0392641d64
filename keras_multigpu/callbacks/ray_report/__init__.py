"""`RayReport`: logs and the model go to Ray Train after each epoch."""
