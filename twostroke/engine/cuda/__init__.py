"""What a CUDA device needs beside a backend: kernels built ahead, captured steps, pages that move."""
