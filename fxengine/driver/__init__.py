"""The CUDA driver layer: devices, memory, kernels, captures."""
