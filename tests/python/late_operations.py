"""Operations that TensorFlow gets to know while a server runs already, as from a library that is loaded late."""

import ctypes
from pathlib import Path

from cluster import tf

_kernels = {}  # of this process, by the operation's name


def register(name, stateful=False):
    """Registers an operation that returns its input, and its kernel, with TensorFlow's C API; does nothing if there is one already."""
    if name in _kernels:
        return
    api = ctypes.CDLL(str(Path(tf.sysconfig.get_lib(), "libtensorflow_framework.so.2")))
    pointer = ctypes.c_void_p
    for function in ("TF_NewOpDefinitionBuilder", "TF_NewKernelBuilder", "TF_NewStatus"):
        getattr(api, function).restype = pointer
    api.TF_Message.restype = ctypes.c_char_p
    status = pointer(api.TF_NewStatus())

    def check():
        assert api.TF_GetCode(status) == 0, api.TF_Message(status)

    definition = pointer(api.TF_NewOpDefinitionBuilder(name.encode()))
    api.TF_OpDefinitionBuilderAddInput(definition, b"x: float")
    api.TF_OpDefinitionBuilderAddOutput(definition, b"y: float")
    if stateful:
        api.TF_OpDefinitionBuilderSetIsStateful(definition, ctypes.c_bool(True))  # whatever the argument
    api.TF_OpDefinitionBuilderSetShapeInferenceFunction(definition, api.TF_ShapeInferenceContextSetUnknownShape)
    api.TF_RegisterOpDefinition(definition, status)
    check()

    @ctypes.CFUNCTYPE(None, pointer, pointer)
    def compute(_, context):
        tensor, ended = pointer(), pointer(api.TF_NewStatus())
        api.TF_GetInput(pointer(context), 0, ctypes.byref(tensor), ended)
        api.TF_SetOutput(pointer(context), 0, tensor, ended)
        api.TF_DeleteTensor(tensor)
        api.TF_DeleteStatus(ended)

    _kernels[name] = compute
    api.TF_RegisterKernelBuilder(name.encode(), pointer(api.TF_NewKernelBuilder(name.encode(), b"CPU", None, compute, None)), status)
    check()
    api.TF_DeleteStatus(status)
