"""Cross-entropy for language models that never keeps the logits. Needs torch and triton, nothing else.

    kernels.cross_entropy         cross_entropy(input, target): the gradient overwrites the logits
    kernels.linear_cross_entropy  linear_cross_entropy(input, linear_weight, target): the logits never exist
    kernels.reference             the same functions in plain PyTorch: the specification, and the CPU path
    kernels.schedules             the chunk loop behind linear_cross_entropy
    kernels.row_kernels           the Triton kernel over rows of logits
    kernels.scaling               gradients times the upstream gradient

Nothing is re-exported here, so that `kernels.reference` can be imported where triton is not installed.
"""
