"""Stand-in for SGLang's compiled kernels on a machine without a GPU: for tests of the launcher and the client.

The published `sglang-kernel` wheel needs CUDA's driver library, so the stock server cannot even be imported without
one. First on PYTHONPATH, this package lets it start with `--device cpu` and serve a small model autoregressively
through PyTorch's own operators. It has every name and no kernel: one that is called says so and fails. Nothing
measured with it says anything about SGLang's speed.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.4.10"


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"the stand-in for sgl_kernel has no {name}")

    return absent
