//! Finds the TensorFlow to compile the shim against without importing it, which takes seconds.

use std::path::PathBuf;
use std::process::Command;

pub struct TensorFlow {
    /// "2.21.0"
    pub version: String,
    /// 221 for 2.21; the sources compare against it.
    pub minor: u32,
    /// …/site-packages/tensorflow: contains include/ and both libraries.
    pub folder: PathBuf,
}

/// Looks in every distribution that installs the package `tensorflow`.
const ASK: &str = r#"
import importlib.metadata as metadata, importlib.util, sys
spec = importlib.util.find_spec("tensorflow")
if spec is None or not spec.submodule_search_locations:
    sys.exit("no package named tensorflow")
for name in ("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tensorflow-rocm", "tensorflow-cpu-aws", "intel-tensorflow"):
    try:
        version = metadata.version(name)
        break
    except metadata.PackageNotFoundError:
        pass
else:
    import tensorflow
    version = tensorflow.__version__
print(version)
print(list(spec.submodule_search_locations)[0])
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
        let found = TensorFlow { minor: minor(version)?, version: version.to_string(), folder: PathBuf::from(folder) };
        found.check()?;
        Ok(found)
    }

    pub fn include_dirs(&self) -> [PathBuf; 3] {
        let include = self.folder.join("include");
        [
            include.clone(),
            include.join("external/com_github_grpc_grpc/include"),
            include.join("external/farmhash_archive/src"),
        ]
    }

    /// In link order: up to 2.18, both define the registry of server factories.
    pub fn libraries(&self) -> [PathBuf; 2] {
        ["libtensorflow_framework.so.2", "libtensorflow_cc.so.2"].map(|name| self.folder.join(name))
    }

    fn check(&self) -> Result<(), String> {
        let header = self.folder.join("include/tensorflow/core/distributed_runtime/rpc/grpc_server_lib.h");
        for file in self.libraries().iter().chain([&header]) {
            if !file.exists() {
                return Err(format!(
                    "TensorFlow {} in {} lacks {}: install a Linux wheel of 2.12 or later",
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
        (Some(2), Some(minor)) if minor >= 12 => Ok(200 + minor),
        _ => Err(format!("TensorFlow {version} is not supported: starwire needs 2.12 or later")),
    }
}
