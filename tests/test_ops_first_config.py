"""The config of a call that nothing was measured for: made once for equal problems."""

import pytest
import torch

pytest.importorskip("triton")

from stof_compile.kernels import attention_blockwise

from stof_compile import ops_first_config
from stof_compile.errors import StofUnsupportedError
from stof_compile.ops_first_config import first_gpu_config


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    ops_first_config._first_config.cache_clear()
    yield
    ops_first_config._first_config.cache_clear()


def meta(q_len, dtype=torch.float16, head_dim=64):
    return torch.empty(2, 4, q_len, head_dim, dtype=dtype, device="meta")


def test_made_once_and_as_offered(monkeypatch):
    asked, offered = [], attention_blockwise.configs

    def counted(*problem, **more):
        asked.append((problem, more))
        return offered(*problem, **more)

    monkeypatch.setattr(attention_blockwise, "configs", counted)
    for q_len in (17, 512, 17, 512):
        for plain in (True, False):
            expected = offered(
                64, torch.float16, (9, 0), value_dim=64, q_len=q_len, planes=8, plain=plain
            )
            assert first_gpu_config("block", meta(q_len), 64, plain) == expected[0]
    assert len(asked) == 4


def test_follows_tf32(monkeypatch):
    def config():
        return first_gpu_config("block", meta(512, torch.float32), 64, True)

    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        exact = config()
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        rounded = config()
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert exact != rounded


def test_none_that_fits_is_an_error_each_time():
    for _ in range(2):
        with pytest.raises(StofUnsupportedError, match="no sparse kernel fits head dims 4096"):
            first_gpu_config("block", meta(64, torch.float32, 4096), 4096, True)
