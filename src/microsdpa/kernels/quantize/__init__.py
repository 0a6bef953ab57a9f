"""The kernels around 8-bit attention: quantization, and the LSE without smoothing."""
