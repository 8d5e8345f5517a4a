"""Variants that only a call asks for, by several threads at once."""

import threading

import torch
from close import assert_close
from running import dense

from stof_compile import attention_kernel, explain, masks

RULE = masks.sliding_window(20)


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(32, 96)

    def forward(self, x, mask=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def test_threads_that_ask_for_kernels_at_once(fresh_dynamo, caplog):
    torch.manual_seed(0)
    model, x = Attention().eval(), torch.randn(2, 96, 32)
    fast = torch.compile(model, backend="stof", options={"tune_budget_s": 0, "mask": RULE})
    with torch.no_grad():
        fast(x)
        wide = Attention().double()
        wide.load_state_dict(model.state_dict())
        expected = wide(x.double(), dense(RULE, 96, 96))
    kernels, found, begun = ("gather", "sdpa", "gather", "sdpa"), [], threading.Barrier(4)

    def call(kernel):
        begun.wait()
        with torch.no_grad(), attention_kernel(kernel):
            found.append(fast(x))

    threads = [threading.Thread(target=call, args=(kernel,)) for kernel in kernels]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == len(kernels)
    for out in found:
        assert_close(out, expected)
    assert not [r for r in caplog.records if r.name == "stof_compile" and r.levelname == "WARNING"]
    assert [site.status for site in explain(fast).sites] == ["rewritten"]
