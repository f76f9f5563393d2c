//! Finds the TensorFlow to compile the shim against. Version 2 is found without importing it, which takes seconds.

use std::path::{Path, PathBuf};
use std::process::Command;

pub struct TensorFlow {
    /// As its package has it: "2.21.0", "2.22.0rc0" or "1.15.5+deeprec2402"
    pub version: String,
    /// 221 for 2.21, 115 for 1.15; the sources compare against it.
    pub minor: u32,
    /// …/site-packages/tensorflow: contains include/ and the libraries.
    pub folder: PathBuf,
    /// Macros that determine the layout of TensorFlow's classes.
    pub layout_flags: Vec<String>,
    /// The interpreter that has it.
    pub python: String,
}

/// Sources that only serve functions of TensorFlow 2 (cc/base/compat.h, STARWIRE_EAGER_PORT), and one that needs gRPC's
/// headers.
const ONLY_TENSORFLOW_2: [&str; 6] = [
    "cc/server/eager_handles.cc",
    "cc/server/grpc_listener.cc",
    "cc/worker/component_functions.cc",
    "cc/worker/eager_client.cc",
    "cc/worker/eager_messages.cc",
    "cc/worker/remote_eager.cc",
];

/// Looks in every distribution that installs the package `tensorflow`. That of version 1 only refers to another
/// package, and only TensorFlow itself knows how it was compiled.
const ASK: &str = r#"
import importlib.util, sys
try:
    import importlib.metadata as metadata
except ImportError:
    metadata = None
spec = importlib.util.find_spec("tensorflow")
if spec is None or not spec.submodule_search_locations:
    sys.exit("no package named tensorflow")
version = None
names = ("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tensorflow-rocm", "tensorflow-cpu-aws", "intel-tensorflow", "tf-nightly", "tf-nightly-cpu")
for name in names if metadata else ():
    try:
        version = metadata.version(name)
        break
    except metadata.PackageNotFoundError:
        pass
folder, flags = list(spec.submodule_search_locations)[0], []
if version is None or version.startswith("1."):
    import tensorflow
    version = tensorflow.__version__.replace("-rc", "rc").replace("-dev", ".dev")
    if version.startswith("1."):
        folder, flags = tensorflow.sysconfig.get_lib(), tensorflow.sysconfig.get_compile_flags()
print("\n".join([version, folder] + [flag for flag in flags if flag.startswith("-D")]))
"#;

impl TensorFlow {
    /// Queries `$STARWIRE_PYTHON`, or the `python3` on the PATH.
    pub fn find() -> Result<TensorFlow, String> {
        println!("cargo::rerun-if-env-changed=STARWIRE_PYTHON");
        let python = std::env::var("STARWIRE_PYTHON").unwrap_or_else(|_| "python3".to_string());
        let answer = Command::new(&python).args(["-c", ASK]).output().map_err(|error| {
            format!("cannot run {python}: {error}. Set STARWIRE_PYTHON to a Python that has TensorFlow")
        })?;
        if !answer.status.success() {
            let reason = String::from_utf8_lossy(&answer.stderr).trim().to_string();
            return Err(format!(
                "{python} has no usable TensorFlow ({reason}). Install it there, set STARWIRE_PYTHON to a Python that has it, or run `make build`"
            ));
        }
        let text = String::from_utf8_lossy(&answer.stdout).to_string();
        let mut lines = text.lines();
        let (Some(version), Some(folder)) = (lines.next(), lines.next()) else {
            return Err(format!("{python} returned an unexpected answer about TensorFlow: {text:?}"));
        };
        let mut found = TensorFlow {
            minor: minor(version)?,
            version: version.to_string(),
            folder: PathBuf::from(folder),
            layout_flags: lines.map(str::to_string).collect(),
            python,
        };
        if !found.is_1() {
            found.layout_flags =
                ["-D_GLIBCXX_USE_CXX11_ABI=1", "-DEIGEN_MAX_ALIGN_BYTES=64"].map(String::from).to_vec();
        }
        found.check()?;
        Ok(found)
    }

    pub fn is_1(&self) -> bool {
        self.minor < 200
    }

    pub fn include(&self) -> PathBuf {
        self.folder.join("include")
    }

    /// In link order: from 2.12 to 2.18, both define the registry of server factories.
    pub fn libraries(&self) -> [PathBuf; 2] {
        let names = if self.is_1() {
            ["libtensorflow_framework.so.1", "python/_pywrap_tensorflow_internal.so"]
        } else {
            ["libtensorflow_framework.so.2", "libtensorflow_cc.so.2"]
        };
        names.map(|name| self.folder.join(name))
    }

    pub fn link_arguments(&self) -> Vec<String> {
        let arguments = self.libraries().map(|library| {
            let folder = library.parent().unwrap_or(Path::new(".")).display().to_string();
            let name = library.file_name().unwrap_or_default().to_string_lossy().into_owned();
            [format!("-L{folder}"), format!("-l:{name}")]
        });
        arguments.concat()
    }

    /// Sources that are not compiled for this version.
    pub fn left_out(&self) -> &'static [&'static str] {
        if self.is_1() { &ONLY_TENSORFLOW_2 } else { &[] }
    }

    fn check(&self) -> Result<(), String> {
        let header = self.include().join(if self.is_1() {
            "tensorflow/core/framework/op_kernel.h"
        } else {
            "tensorflow/core/distributed_runtime/rpc/grpc_server_lib.h"
        });
        for file in self.libraries().iter().chain([&header]) {
            if !file.exists() {
                return Err(format!(
                    "TensorFlow {} in {} lacks {}: install a Linux wheel of 1.15.5, or of 2.12 or later",
                    self.version,
                    self.folder.display(),
                    file.display()
                ));
            }
        }
        Ok(())
    }
}

fn minor(version: &str) -> Result<u32, String> {
    let mut numbers = version.split('.').map(|part| part.parse::<u32>().ok());
    match (numbers.next().flatten(), numbers.next().flatten()) {
        (Some(1), Some(15)) => Ok(115),
        (Some(2), Some(minor)) if minor >= 12 => Ok(200 + minor),
        _ => Err(format!("TensorFlow {version} is not supported: starwire needs 1.15, or 2.12 or later")),
    }
}
