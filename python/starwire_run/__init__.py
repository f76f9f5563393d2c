"""``starwire run``, and the replacement of the protocol of scripts that ask for ``grpc``.

Separate from the package ``starwire``, whose import loads TensorFlow: nothing here does. A process that never imports TensorFlow gets one
small import hook and nothing else.
"""

import pathlib
import runpy

__version__ = runpy.run_path(str(pathlib.Path(__file__).resolve().parent.parent / "starwire" / "_version.py"))["__version__"]
