"""What all tests share. On a machine without a GPU the kernels run in Triton's interpreter."""

import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before `kernels` is imported
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"

ENGINES = ["plain", pytest.param("triton", marks=pytest.mark.skipif(HAS_GPU, reason="the GPU tests run the kernels"))]


@pytest.fixture(params=ENGINES)
def engine(request, monkeypatch):
    """Runs a test on CPU tensors twice: through plain PyTorch, and through the kernels in the interpreter (fp32)."""
    from kernels import row_kernels

    if request.param == "triton":
        monkeypatch.setattr(row_kernels, "runs_triton", lambda tensor: True)
    return request.param


@pytest.fixture(scope="session")
def inductor():
    """The name of the backend, where there is all that it needs on a CPU: a C++ compiler, Python's headers."""
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(3))
    except Exception as error:
        pytest.skip(f"inductor compiles nothing here: {str(error).splitlines()[0]}")
    return "inductor"


def pytest_collection_modifyitems(items):
    skip = pytest.mark.skip(reason="needs a CUDA GPU; the interpreter is no proof for bf16, speed or memory")
    for item in items:
        if "gpu" in item.keywords and not HAS_GPU:
            item.add_marker(skip)


def pytest_report_header():
    if HAS_GPU:
        return f"kernels: compiled, on {torch.cuda.get_device_name()}"
    return (
        "kernels: in Triton's interpreter, fp32 only; tests marked gpu are skipped, so no kernel is verified on a GPU"
    )
