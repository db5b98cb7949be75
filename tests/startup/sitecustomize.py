"""Python runs this in every process that the suite starts; see the modules."""

import compiler_later  # noqa: F401
import large_imports  # noqa: F401
