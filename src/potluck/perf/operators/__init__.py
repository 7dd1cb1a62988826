"""What one layer asks of one GPU, and how long each part takes: kernels, formats, experts, collectives."""
