"""Every error a user can meet. A leaf module: all packages may import it, it imports nothing.

ColibriError
├── UsageError              a flag or argument that cannot be used (exit code 2)
├── CheckpointError         a model file that is broken, incomplete or hostile; names the file and the tensor
├── UnsupportedError        an architecture, format, CPU or platform that is not supported; lists what is
├── StoreError              an expert store that cannot be read or written
│   └── CorruptRecordError  a record whose checksum or length is wrong
├── BudgetError             the memory budget is too small; says the minimum and the remedy
├── TextError               a tokenizer or chat template that cannot be used
├── NumericsError           NaN or Inf where numbers must be finite; names the layer
└── JitError                a kernel that cannot be compiled or was called wrongly
    └── KernelArgumentError
"""


class ColibriError(Exception):
    """Root of the tree. The message is one line: what happened, the value found, what to do."""


class UsageError(ColibriError):
    """A flag or argument that cannot be used."""


class CheckpointError(ColibriError):
    """A model file that is broken, incomplete or hostile."""


class UnsupportedError(ColibriError):
    """An architecture, format, CPU or platform that is not supported."""


class StoreError(ColibriError):
    """An expert store that cannot be read or written."""


class CorruptRecordError(StoreError):
    """A record whose checksum or length is wrong."""


class BudgetError(ColibriError):
    """The memory budget is too small for what was asked."""


class TextError(ColibriError):
    """A tokenizer or chat template that cannot be used."""


class NumericsError(ColibriError):
    """NaN or Inf where numbers must be finite."""


class JitError(ColibriError):
    """A kernel that cannot be compiled."""


class KernelArgumentError(JitError):
    """A kernel argument whose shape, dtype or alignment disagrees with the others."""
