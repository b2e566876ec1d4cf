"""Reading model files: Hugging Face folders and GGUF files, to one configuration and one set of tensor names."""
