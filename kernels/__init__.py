"""Cross-entropy for language models that never keeps the logits. Needs torch and triton, nothing else.

    kernels.cross_entropy         cross_entropy(input, target): the gradient overwrites the logits
    kernels.linear_cross_entropy  linear_cross_entropy(input, linear_weight, target): the logits never exist
    kernels.reference             the same functions in plain PyTorch: the specification, and the CPU path
    kernels.plan                  bytes and time of its schedules; the choice within a budget
    kernels.schedules             its loops over token chunks and vocabulary slabs
    kernels.gemm                  the product that makes the logits, with the softmax in its epilogue
    kernels.vocab_parallel        the same loss with the vocabulary cut over ranks
    kernels.row_kernels           the Triton kernel over rows of logits

Nothing is re-exported here, so that `kernels.reference` can be imported where triton is not installed.
"""
