"""Executing a notebook by papermill, in a kernel of this very interpreter, without losing an interrupt or a process.

papermill's own cell status is not to be trusted: a kernel killed for memory leaves a notebook whose cells all say
"completed". Whoever executes one looks at what it wrote.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

__all__ = ["execute_notebook", "read_parameters"]

JOIN_S = 0.2


def read_parameters(notebook: Path) -> set[str]:
    """Names in the parameters cell. papermill itself only warns of one that a notebook lacks."""
    import papermill

    return set(papermill.inspect_notebook(str(notebook)))


def execute_notebook(
    source: Path, output: Path, parameters: dict[str, Any], *, watch: Callable[[], object] = lambda: None
) -> str | None:
    """Execute a notebook by papermill in a kernel of this very interpreter; what failed, or None.

    The executed copy stays at `output` either way. `watch` is called a few times a second meanwhile. What it raises,
    or an interrupt, kills the kernel and propagates.
    """
    # In a thread, because papermill's client takes over the signals of the main one and so hides an interrupt.
    with (
        tempfile.TemporaryDirectory(prefix="benchlib-") as folder,
        ThreadPoolExecutor(1, thread_name_prefix="papermill") as pool,
    ):
        manager = _kernel_manager(Path(folder))
        future = pool.submit(_papermill, source, output, parameters, manager)
        try:
            while not wait([future], JOIN_S).done:
                watch()
        finally:
            manager.kill()
        return future.result()


def _papermill(source: Path, output: Path, parameters: dict[str, Any], manager: Any) -> str | None:
    import papermill
    from jupyter_core.utils import ensure_event_loop
    from nbclient.exceptions import DeadKernelError

    loop = ensure_event_loop()  # this thread's, which nbclient would make and leave open
    # What fails is returned, and a kernel that dies of an interrupt is no news.
    logging.getLogger("papermill").setLevel(logging.CRITICAL)
    logging.getLogger("traitlets").setLevel(logging.CRITICAL)
    try:
        papermill.execute_notebook(
            os.path.relpath(source),
            os.path.relpath(output),
            parameters,
            kernel_name="python3",
            language="python",
            kernel_manager_class=manager,
            progress_bar=False,
        )
    except papermill.PapermillExecutionError as error:
        return f"{error.ename}: {error.evalue}"
    except (DeadKernelError, RuntimeError) as error:
        return f"the notebook's kernel failed: {type(error).__name__}: {error}"
    finally:
        loop.close()
    return None


def _kernel_manager(folder: Path) -> Any:
    """A kernel manager class whose kernel is this interpreter, whatever kernelspecs the machine has.

    Its channels are files in `folder`: no ports to clash, and no warning about unencrypted TCP. One class an
    execution, because papermill makes the instance; `kill` ends its kernels, one that is still to come included.
    """
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager

    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    pids: list[int] = []
    killed = False

    class OwnKernelManager(AsyncKernelManager):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs, transport="ipc", connection_file=str(folder / "kernel.json"))

        @property
        def kernel_spec(self) -> KernelSpec:
            return KernelSpec(argv=command, display_name="Python 3", language="python")

        async def start_kernel(self, **kwargs: Any) -> None:  # type: ignore[override]
            await super().start_kernel(**kwargs)
            pids.append(cast(Any, self.provisioner).pid)
            if killed:
                self.kill()

        @staticmethod
        def kill() -> None:
            nonlocal killed
            killed = True
            for pid in pids:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)

    return OwnKernelManager
