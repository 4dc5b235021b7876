"""Worker process for reward functions: load the functions and call them with the samples that the pool sends.

`camshaft.workers` starts it and exchanges the messages; `messages.py` describes their contents.
"""

from camshaft.errors import CamshaftError
from camshaft.masking import remember_secrets
from camshaft.rewards.calls import call, call_async, format_traceback, to_message
from camshaft.rewards.loading import load_functions
from camshaft.rewards.messages import LoadResult, Spec
from camshaft.workers.child import Parent


def main(stack_file: str) -> None:
    """Serve calls until the driver closes standard input. Write stacks to the descriptor `stack_file` on request."""
    parent = Parent(int(stack_file))
    spec: Spec | None = parent.get()
    if spec is None:
        return
    remember_secrets(*(function.kwargs for function in spec.functions))
    try:
        functions = load_functions(spec)
    except CamshaftError as error:
        parent.ready(LoadResult(to_message(error)))
        return
    except Exception as error:
        names = ", ".join(function.text for function in spec.functions)
        parent.ready(LoadResult(f"{names} could not be loaded:\n{format_traceback(error)}"))
        return
    parent.ready(LoadResult(None, tuple(function.info for function in functions)))
    parent.serve(
        lambda samples: call(functions[samples.function], samples, spec),
        lambda samples: call_async(functions[samples.function], samples, spec),
    )
