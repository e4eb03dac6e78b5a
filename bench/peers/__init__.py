"""Headwater's CUDA attention beside FlashInfer's and FlashAttention 3's on the same cells: python -m bench.peers --help."""
