//! Compiles the C++ shim against `LIBTORCH` and sets the run path of every binary.
//!
//! If `LIBTORCH/lib/libtorch_cuda.so` exists, the script builds the CUDA variant and sets `cfg(locdiff_cuda)`.
//! torch-sys follows the same rule, so both crates always build the same variant.

use std::path::{Path, PathBuf};

/// The libtorch version that torch-sys is generated for.
const LIBTORCH_VERSION: &str = "2.11.0";

fn main() {
    println!("cargo::rerun-if-env-changed=LIBTORCH");
    // If the path is a folder, cargo checks every file in the folder.
    println!("cargo::rerun-if-changed=src/native/stubs");
    println!("cargo::rerun-if-changed=src/native/shim");
    let libtorch = PathBuf::from(std::env::var("LIBTORCH").unwrap_or_default());
    if let Err(reason) = check_version(&libtorch) {
        println!("cargo::error={reason}; run `make setup`, and unset LIBTORCH if you have set it");
        return;
    }
    let cuda = libtorch.join("lib/libtorch_cuda.so").exists();
    if cuda {
        println!("cargo::rustc-cfg=locdiff_cuda");
    }
    // Clippy does not need the compiled shim. Clippy runs this script with a separate output folder, so without this
    // condition the shim would be compiled a second time.
    if std::env::var_os("CLIPPY_ARGS").is_none() {
        compile_shim(&libtorch, cuda);
    }
    link(&libtorch, cuda);
}

/// Checks the version of libtorch. The version is read from the headers, because every kind of libtorch folder has
/// them: an unpacked wheel, an unpacked zip archive, and the folder of links that `make setup` creates.
fn check_version(libtorch: &Path) -> Result<(), String> {
    let header = libtorch.join("include/torch/headeronly/version.h");
    let text = std::fs::read_to_string(&header)
        .map_err(|error| format!("no libtorch at LIBTORCH={}: {}: {error}", libtorch.display(), header.display()))?;
    let part = |name: &str| {
        text.lines()
            .find_map(|line| line.strip_prefix("#define TORCH_VERSION_")?.strip_prefix(name))
            .map_or("?", str::trim)
    };
    let found = format!("{}.{}.{}", part("MAJOR "), part("MINOR "), part("PATCH "));
    if found != LIBTORCH_VERSION {
        return Err(format!("libtorch at {} is version {found}, wanted {LIBTORCH_VERSION}", libtorch.display()));
    }
    Ok(())
}

fn compile_shim(libtorch: &Path, cuda: bool) {
    let mut build = cc::Build::new();
    build
        .cpp(true)
        .std("c++17")
        .opt_level(2)
        .include("src/native/stubs")
        .flag("-isystem")
        .flag(libtorch.join("include").to_str().expect("LIBTORCH was read as UTF-8"))
        .flag("-isystem")
        .flag(libtorch.join("include/torch/csrc/api/include").to_str().expect("LIBTORCH was read as UTF-8"))
        .define("USE_C10D_GLOO", None);
    if cuda {
        let nvidia = real_lib_dir(libtorch).join("../../nvidia");
        for include in ["cu13/include", "cu13/include/cccl", "nccl/include"] {
            build.flag("-isystem").flag(nvidia.join(include).to_str().expect("LIBTORCH was read as UTF-8"));
        }
        build.define("USE_C10D_NCCL", None).define("LOCDIFF_CUDA", None);
    }
    build.file(unity_source(cuda)).compile("locdiff_shim");
}

/// Writes one C++ file that includes all sources of the shim. The compiler then parses libtorch's headers, which take
/// most of the compile time, only once.
fn unity_source(cuda: bool) -> PathBuf {
    let here = std::env::current_dir().expect("cargo runs build scripts in the crate's folder");
    let lines: Vec<String> =
        sources(cuda).iter().map(|source| format!("#include \"{}\"\n", here.join(source).display())).collect();
    let unit = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join("shim.cpp");
    std::fs::write(&unit, lines.concat()).expect("OUT_DIR is writable");
    unit
}

/// Lists the C++ files in `src/native/shim`. Files whose names begin with `cuda` are listed only for the CUDA variant.
fn sources(cuda: bool) -> Vec<PathBuf> {
    let is_cuda = |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("cuda"));
    let folder = std::fs::read_dir("src/native/shim").expect("src/native/shim is part of the crate");
    let mut files: Vec<PathBuf> = folder
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "cpp") && (cuda || !is_cuda(path)))
        .collect();
    files.sort();
    files
}

/// The folder that holds the library files. A folder that `make setup` creates for `LIBTORCH` holds only links to these
/// files. If the libraries were loaded through the links, their `$ORIGIN` run paths would point to the wrong folder.
fn real_lib_dir(libtorch: &Path) -> PathBuf {
    let library = libtorch.join("lib/libtorch_cpu.so");
    let real = library.canonicalize().unwrap_or(library);
    real.parent().map(Path::to_path_buf).unwrap_or_default()
}

fn link(libtorch: &Path, cuda: bool) {
    println!("cargo::rustc-link-search=native={}", libtorch.join("lib").display());
    for library in ["torch_cpu", "c10"] {
        println!("cargo::rustc-link-lib=dylib={library}");
    }
    // An installed binary uses the first run path, where `make install` puts the libraries. A binary in the target
    // folder uses the second run path.
    println!("cargo::rustc-link-arg=-Wl,-rpath,$ORIGIN/../lib/locdiff/torch/lib");
    println!("cargo::rustc-link-arg=-Wl,-rpath,{}", real_lib_dir(libtorch).display());
    if cuda {
        let cudart = real_lib_dir(libtorch).join("../../nvidia/cu13/lib");
        println!("cargo::rustc-link-arg=-L{}", cudart.display());
        // The worker needs libcudart directly, and the run paths of libtorch's libraries do not apply to the worker's
        // direct dependencies.
        println!("cargo::rustc-link-arg=-Wl,-rpath,$ORIGIN/../lib/locdiff/nvidia/cu13/lib");
        println!("cargo::rustc-link-arg=-Wl,-rpath,{}", cudart.display());
        // libtorch_cuda registers its kernels when it is loaded. No symbol of the library is referenced, so without
        // `--no-as-needed` the linker would drop the library.
        for argument in [
            "--allow-shlib-undefined",
            "--no-as-needed",
            "-ltorch_cuda",
            "-lc10_cuda",
            "-l:libcudart.so.13",
            "--as-needed",
        ] {
            let prefix = if argument.starts_with("--") { "-Wl," } else { "" };
            println!("cargo::rustc-link-arg={prefix}{argument}");
        }
    }
}
