"""Tensors and nested state in files.

``tensorfile`` reads and writes safetensors files, ``encoding`` turns nested state into JSON and
tensors, and ``modelfile`` saves the weights of a model.
"""
