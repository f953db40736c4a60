"""Read and write the weight formats of other projects: official .npz, timm, transformers, .pth."""
