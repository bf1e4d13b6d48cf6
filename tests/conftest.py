"""Which operators a test runs with."""

import pytest
from op_cases import require_fused

from megatron_prores.ops.choice import use_op


@pytest.fixture
def torch_op():
    """Plain torch, which is bit for bit Megatron's at alpha = 1."""
    use_op("torch")
    yield
    use_op("auto")


@pytest.fixture(params=["fused", "torch"])
def op(request):
    """Both implementations, one after the other."""
    if request.param == "fused":
        require_fused()
    use_op(request.param)
    yield request.param
    use_op("auto")
