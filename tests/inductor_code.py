"""What Inductor's wrapper writes for a kernel."""

from torch._inductor.codegen.wrapper import PythonWrapperCodegen


def as_inductor_writes(body):
    """The code of a kernel after ``PythonWrapperCodegen.define_kernel``, as it is just now."""
    written = []

    class Wrapper(PythonWrapperCodegen):
        def __init__(self):
            pass

        def writeline(self, line):
            written.append(line.kernel_body)

    Wrapper().define_kernel("kernel", body, None, gpu=True)
    (code,) = written
    return code
