"""Attention kernels for drafters: one folder per shape, each specified by a plain PyTorch reference.

Example: ``from specbench.drafters.kernels.chain import chain_attention``.
"""
