//! Compiles `cc/**/*.cc` against the installed TensorFlow, a few files at a time, recompiling only what is stale.
//!
//! Outputs live in `target/tf-<version>/`, outside cargo's own folders, so that switching TensorFlow versions or cargo
//! profiles recompiles nothing. TensorFlow's headers cost ten seconds and a gigabyte per compilation; if many are
//! needed, they are precompiled once (`cc/base/pch.h`; STARWIRE_PCH=0 turns that off). Three seconds remain, for
//! templates that the headers use, so a few files of one folder are compiled as one.

use crate::elf;
use crate::headers;
use crate::tensorflow::TensorFlow;
use std::collections::HashSet;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::SystemTime;

/// Number of stale units from which a precompiled header pays off.
const PCH_PAYS_FROM: usize = 3;
/// Most bytes of the files that are compiled as one, unless one file is longer.
const UNIT_BYTES: u64 = 48 << 10;
/// Memory that one compiler process may need, in kB.
const MEMORY_PER_JOB: u64 = 1_600_000;

pub fn build() -> Result<(), String> {
    let tensorflow = TensorFlow::find()?;
    for variable in ["CXX", "CXXFLAGS", "STARWIRE_PCH"] {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    println!("cargo::rerun-if-changed=cc");
    println!("cargo::rerun-if-changed=include");
    println!("cargo::rerun-if-changed={}", tensorflow.libraries()[0].display());

    let shim = Shim::new(&tensorflow)?;
    let sources = sources(Path::new("cc"), tensorflow.left_out())?;
    if sources.is_empty() {
        return Err("cc/ has no sources".to_string());
    }
    let objects = shim.compile(&sources)?;
    let linkable = shim.weaken(&objects, &tensorflow)?;
    let archive = shim.archive(&linkable)?;
    shim.write_flags(&tensorflow, &objects)?;

    let link = |argument: &str| println!("cargo::rustc-link-arg-cdylib={argument}");
    // lld, rustc's default since 1.90, rejects TensorFlow 2.12's libraries as corrupt.
    link("-fuse-ld=bfd");
    link("-Wl,--whole-archive");
    link(&archive.display().to_string());
    link("-Wl,--no-whole-archive,--no-as-needed");
    tensorflow.link_arguments().iter().for_each(|argument| link(argument));
    link("-Wl,--as-needed");
    link("-lstdc++");
    link("-lm");
    // Again: on aarch64 it is the loader, of which only C++ needs something, that has the stack protector's value.
    link("-lc");
    link("-Wl,-z,defs");
    // Full RELRO, which rustc also sets on the targets it knows.
    link("-Wl,-z,relro,-z,now");
    link("-Wl,-z,noexecstack");
    // TensorFlow's libraries have dependencies that are only resolved at load time.
    link("-Wl,--allow-shlib-undefined");
    println!("cargo::rustc-env=STARWIRE_TF_VERSION={}", tensorflow.version);
    Ok(())
}

struct Shim {
    folder: PathBuf,
    compiler: PathBuf,
    flags: Vec<String>,
}

impl Shim {
    fn new(tensorflow: &TensorFlow) -> Result<Shim, String> {
        let folder = target_folder()?.join(format!("tf-{}", tensorflow.version));
        create(&folder.join("obj"))?;
        let tool = cc::Build::new().cpp(true).cargo_metadata(false).try_get_compiler();
        let compiler = tool.map_err(|error| format!("no C++ compiler: {error}"))?.path().to_path_buf();
        let mut flags: Vec<String> = [
            "-std=c++17",
            "-O2",
            "-g1",
            "-fPIC",
            "-fvisibility=hidden",
            "-fvisibility-inlines-hidden",
            "-Wall",
            "-Wno-sign-compare",
            // What the newest TensorFlow deprecates is all that the oldest has.
            "-Wno-deprecated-declarations",
            "-pthread",
            // Hardening, as these files parse peers' bytes. Some distributions' compilers predefine _FORTIFY_SOURCE.
            "-fstack-protector-strong",
            "-U_FORTIFY_SOURCE",
            "-D_FORTIFY_SOURCE=2",
            // Together with `layout_flags` this determines the layout of TensorFlow's classes.
            "-DNDEBUG",
            "-Iinclude",
            "-I.",
        ]
        .map(String::from)
        .to_vec();
        flags.extend(tensorflow.layout_flags.iter().cloned());
        flags.push(format!("-DSTARWIRE_TF_VERSION=\"{}\"", tensorflow.version));
        flags.push(format!("-DSTARWIRE_TF_MINOR={}", tensorflow.minor));
        let headers = headers::prepare(tensorflow, &compiler, &folder.join("headers"))?;
        for dir in headers {
            flags.extend(["-isystem".to_string(), dir.display().to_string()]);
        }
        flags.extend(std::env::var("CXXFLAGS").unwrap_or_default().split_whitespace().map(String::from));
        Ok(Shim { folder, compiler, flags })
    }

    fn compile(&self, sources: &[PathBuf]) -> Result<Vec<PathBuf>, String> {
        let units = group(sources)
            .iter()
            .map(|(name, sources)| Unit::new(name, sources, &self.folder.join("obj")))
            .collect::<Result<Vec<_>, _>>()?;
        self.remove_leftovers(&units)?;
        let mut stale: Vec<&Unit> = units.iter().filter(|unit| unit.is_stale(&self.command(unit, None))).collect();
        // The longest first: both compilers finish at about the same time.
        stale.sort_by_key(|unit| std::cmp::Reverse(unit.bytes));
        if !stale.is_empty() {
            let pch = self.precompile(stale.len())?;
            self.run_all(&stale, pch.as_deref())?;
        }
        Ok(units.into_iter().map(|unit| unit.object).collect())
    }

    /// Removes objects and units of sources that no longer exist.
    fn remove_leftovers(&self, units: &[Unit]) -> Result<(), String> {
        let wanted: HashSet<&Path> = units.iter().flat_map(|unit| [unit.object.as_path(), &unit.source]).collect();
        for entry in fs::read_dir(self.folder.join("obj")).map_err(|error| error.to_string())?.flatten() {
            let path = entry.path();
            if path.extension().is_some_and(|e| e == "o" || e == "cc") && !wanted.contains(path.as_path()) {
                let _ = fs::remove_file(path);
            }
        }
        Ok(())
    }

    fn command(&self, unit: &Unit, pch: Option<&Path>) -> Vec<String> {
        let mut arguments = self.flags.clone();
        if let Some(header) = pch {
            arguments.extend(["-include".to_string(), header.display().to_string(), "-Winvalid-pch".to_string()]);
        }
        if unit.language == "c++" {
            // What a unit includes is not all headers, for which this warning is meant.
            arguments.push("-Wno-subobject-linkage".to_string());
        }
        arguments.extend(unit.arguments());
        arguments
    }

    /// Returns the header to include first, if a precompiled one exists or is worth making.
    fn precompile(&self, stale: usize) -> Result<Option<PathBuf>, String> {
        let source = Path::new("cc/base/pch.h");
        if std::env::var("STARWIRE_PCH").is_ok_and(|value| value == "0") || !source.exists() {
            return Ok(None);
        }
        let folder = self.folder.join("pch");
        create(&folder)?;
        // gcc looks for pch.h.gch next to the pch.h named in -include.
        let (header, output) = (folder.join("pch.h"), folder.join("pch.h.gch"));
        let unit = Unit { source: header.clone(), object: output.clone(), language: "c++-header", bytes: 0 };
        let command = self.command(&unit, None);
        let text = read(source)?;
        let fresh = fs::read_to_string(&header).is_ok_and(|old| old == text) && !unit.is_stale(&command);
        if !fresh && stale < PCH_PAYS_FROM {
            return Ok(None);
        }
        if !fresh {
            write(&header, &text)?;
            if let Err(error) = unit.run(&self.compiler, &command, &command) {
                println!("cargo::warning=no precompiled header, compiling without it: {error}");
                return Ok(None);
            }
        }
        Ok(Some(header))
    }

    fn run_all(&self, stale: &[&Unit], pch: Option<&Path>) -> Result<(), String> {
        let next = AtomicUsize::new(0);
        let errors = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for _ in 0..jobs().min(stale.len()) {
                scope.spawn(|| {
                    while let Some(unit) = stale.get(next.fetch_add(1, Ordering::Relaxed)) {
                        // The stamp is the command without the header: the header does not affect the object.
                        let result = unit.run(&self.compiler, &self.command(unit, pch), &self.command(unit, None));
                        if let (Err(error), Ok(mut errors)) = (result, errors.lock()) {
                            errors.push(error);
                        }
                    }
                });
            }
        });
        let errors = errors.into_inner().map_err(|error| error.to_string())?;
        if errors.is_empty() { Ok(()) } else { Err(errors.join("\n")) }
    }

    /// Copies the objects, making references to TensorFlow's symbols weak: see `elf`.
    fn weaken(&self, objects: &[PathBuf], tensorflow: &TensorFlow) -> Result<Vec<PathBuf>, String> {
        let mut undefined = HashSet::new();
        for object in objects {
            undefined.extend(elf::undefined(object)?);
        }
        let mut provided = HashSet::new();
        for library in tensorflow.libraries() {
            provided.extend(elf::defined_in(&library, &undefined)?);
        }
        let folder = self.folder.join("weak");
        let _ = fs::remove_dir_all(&folder);
        create(&folder)?;
        let copy = |object: &PathBuf| {
            let path = folder.join(object.file_name().ok_or("object without a name")?);
            write(&path, elf::weaken(object, &provided)?)?;
            Ok(path)
        };
        objects.iter().map(copy).collect()
    }

    fn archive(&self, objects: &[PathBuf]) -> Result<PathBuf, String> {
        // The folder contains the version, so that cargo notices a changed linker input.
        let archive = self.folder.join("libstarwire_shim.a");
        let _ = fs::remove_file(&archive);
        let status = Command::new("ar").arg("crsD").arg(&archive).args(objects).status();
        match status {
            Ok(status) if status.success() => Ok(archive),
            Ok(status) => Err(format!("ar failed: {status}")),
            Err(error) => Err(format!("cannot run ar (Debian: apt-get install binutils): {error}")),
        }
    }

    /// Writes the compiler flags for the shim's tests, which the Makefiles include. Make splits names of files at
    /// spaces, so these are relative.
    fn write_flags(&self, tensorflow: &TensorFlow, objects: &[PathBuf]) -> Result<(), String> {
        let quoted = |words: &[String]| words.iter().map(|word| format!("'{word}'")).collect::<Vec<_>>().join(" ");
        let root = env::current_dir().map_err(|error| format!("the current folder: {error}"))?;
        let relative = |object: &PathBuf| object.strip_prefix(&root).unwrap_or(object).display().to_string();
        let objects: Vec<String> = objects.iter().map(relative).collect();
        let text = format!(
            "SHIM_CXX = {}\nSHIM_CXXFLAGS = {}\nSHIM_OBJECTS = {}\nSHIM_TF = {}\nSHIM_LINK = {}\nSHIM_LEFT_OUT = {}\n",
            self.compiler.display(),
            quoted(&self.flags),
            objects.join(" "),
            tensorflow.folder.display(),
            quoted(&tensorflow.link_arguments()),
            tensorflow.left_out().join(" ")
        );
        // The tests are compiled again when the file is newer.
        let path = self.folder.join("flags.mk");
        if fs::read_to_string(&path).is_ok_and(|old| old == text) { Ok(()) } else { write(&path, text) }
    }
}

/// What is compiled at once, and its object.
struct Unit {
    source: PathBuf,
    object: PathBuf,
    language: &'static str,
    /// Length of the files that the source includes.
    bytes: u64,
}

impl Unit {
    /// Writes the source, which includes these.
    fn new(name: &str, sources: &[PathBuf], folder: &Path) -> Result<Unit, String> {
        let source = folder.join(format!("{name}.cc"));
        let text: String = sources.iter().map(|source| format!("#include \"{}\"\n", source.display())).collect();
        if !fs::read_to_string(&source).is_ok_and(|old| old == text) {
            write(&source, text)?;
        }
        let bytes = sources.iter().map(|source| size(source)).sum();
        Ok(Unit { source, object: folder.join(format!("{name}.o")), language: "c++", bytes })
    }

    fn beside(&self, suffix: &str) -> PathBuf {
        PathBuf::from(format!("{}.{suffix}", self.object.display()))
    }

    fn arguments(&self) -> Vec<String> {
        let paths = [&self.beside("d"), &self.source];
        let [depfile, source] = paths.map(|path| path.display().to_string());
        ["-x", self.language, "-MMD", "-MF", &depfile, "-c", &source].map(String::from).to_vec()
    }

    /// True if made by another command, or older than one of its inputs.
    fn is_stale(&self, command: &[String]) -> bool {
        if fs::read_to_string(self.beside("cmd")).ok() != Some(command.join("\n")) {
            return true;
        }
        let (Some(made), Ok(deps)) = (modified(&self.object), fs::read_to_string(self.beside("d"))) else {
            return true;
        };
        let names = deps.split_once(": ").map_or("", |(_, names)| names);
        let mut inputs = names.split_whitespace().filter(|name| *name != "\\");
        inputs.any(|input| modified(Path::new(input)).is_none_or(|changed| changed > made))
    }

    fn run(&self, compiler: &Path, command: &[String], stamp: &[String]) -> Result<(), String> {
        let started = SystemTime::now();
        let temporary = self.beside(&format!("{}.tmp", std::process::id()));
        let output = Command::new(compiler)
            .args(command)
            .arg("-o")
            .arg(&temporary)
            .output()
            .map_err(|error| format!("cannot run {}: {error}", compiler.display()))?;
        let text = String::from_utf8_lossy(&output.stderr);
        if !output.status.success() {
            let _ = fs::remove_file(&temporary);
            return Err(format!("{} does not compile:\n{text}", self.source.display()));
        }
        for line in text.lines() {
            println!("cargo::warning={line}");
        }
        // The object dates from the start of the compilation, so that an edit during it counts as newer.
        fs::File::options()
            .write(true)
            .open(&temporary)
            .and_then(|file| file.set_modified(started))
            .and_then(|()| fs::rename(&temporary, &self.object))
            .map_err(|error| format!("{}: {error}", self.object.display()))?;
        write(&self.beside("cmd"), stamp.join("\n"))
    }
}

/// Neighbours in one folder that are compiled as one, and its name.
fn group(sources: &[PathBuf]) -> Vec<(String, Vec<PathBuf>)> {
    let mut groups: Vec<(String, Vec<PathBuf>)> = Vec::new();
    let (mut bytes, mut number) = (0, 0);
    for source in sources {
        let folder = source.parent().unwrap_or(Path::new("")).display().to_string().replace('/', "-");
        let same_folder = groups.last().is_some_and(|(_, group)| group[0].parent() == source.parent());
        bytes += size(source);
        match groups.last_mut() {
            Some((_, group)) if same_folder && bytes <= UNIT_BYTES => group.push(source.clone()),
            _ => {
                number = if same_folder { number + 1 } else { 1 };
                bytes = size(source);
                groups.push((format!("{folder}-{number}"), vec![source.clone()]));
            }
        }
    }
    groups
}

fn size(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |data| data.len())
}

fn sources(folder: &Path, left_out: &[&str]) -> Result<Vec<PathBuf>, String> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).map_err(|error| format!("{}: {error}", folder.display()))?.flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "cc")
                && !path.to_string_lossy().ends_with("_test.cc")
                && !left_out.iter().any(|name| path == Path::new(name))
            {
                found.push(path);
            }
        }
    }
    found.sort();
    Ok(found)
}

/// Returns cargo's target folder: the ancestor of OUT_DIR with cargo's marker files.
fn target_folder() -> Result<PathBuf, String> {
    let out = PathBuf::from(std::env::var("OUT_DIR").map_err(|_| "OUT_DIR is not set: run through cargo".to_string())?);
    let marked =
        out.ancestors().find(|folder| folder.join("CACHEDIR.TAG").exists() || folder.join(".rustc_info.json").exists());
    marked.or(out.ancestors().nth(4)).map(Path::to_path_buf).ok_or(format!("no target folder above {}", out.display()))
}

/// At most two compilers; fewer if cargo has fewer jobs or memory is short.
fn jobs() -> usize {
    let asked = std::env::var("NUM_JOBS").ok().and_then(|jobs| jobs.parse().ok()).unwrap_or(1);
    let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = memory.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let available = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(u64::MAX);
    let fit = usize::try_from(available / MEMORY_PER_JOB).unwrap_or(usize::MAX);
    asked.min(2).min(fit).max(1)
}

fn modified(path: &Path) -> Option<SystemTime> {
    fs::metadata(path).and_then(|data| data.modified()).ok()
}

pub fn create(folder: &Path) -> Result<(), String> {
    fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))
}

pub fn read(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
}

pub fn write(path: &Path, bytes: impl AsRef<[u8]>) -> Result<(), String> {
    fs::write(path, bytes).map_err(|error| format!("{}: {error}", path.display()))
}
