"""protoc.py LIBRARY ARGUMENT…: runs the protoc of the installed grpcio-tools; LIBRARY is protoc.cc, compiled."""

import ctypes
import glob
import os
import sys

import grpc_tools

folder = os.path.dirname(grpc_tools.__file__)
ctypes.CDLL(glob.glob(os.path.join(folder, "_protoc_compiler*.so"))[0], ctypes.RTLD_GLOBAL)
protoc = ctypes.CDLL(sys.argv[1]).starwire_protoc
arguments = ["protoc", "-I" + os.path.join(folder, "_proto")] + sys.argv[2:]
sys.exit(protoc(len(arguments), (ctypes.c_char_p * len(arguments))(*map(os.fsencode, arguments))))
