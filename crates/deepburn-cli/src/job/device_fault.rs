//! [`DeviceFault`]: what went wrong on a device, in one line, and what to do.
//!
//! The errors of CubeCL and cudarc are made for developers. They repeat each failed launch, with
//! the source of its kernel, and their first lines do not say what happened: "Error while reading
//! data". This module finds the known causes in such a text.

use std::fmt;

/// The length at which a text is cut. Some contain whole programs.
const LONGEST_TEXT: usize = 400;

/// What went wrong on a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DeviceFault {
    /// What happened.
    pub(crate) cause: String,
    /// What to do; `None` if the cause is not a known one.
    pub(crate) remedy: Option<&'static str>,
}

impl fmt::Display for DeviceFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.remedy {
            Some(remedy) => write!(f, "{}; {remedy}", self.cause),
            None => f.write_str(&self.cause),
        }
    }
}

/// What to do if kernels need CUDA's headers.
const FIND_HEADERS: &str = "set CUDA_PATH to the folder with include/cuda_runtime.h: CUDA's, or nvidia/cu13 of NVIDIA's Python packages";

/// What to do if there is no compiler of kernels.
const FIND_COMPILER: &str = "add the folder with libnvrtc.so.13 to LD_LIBRARY_PATH: lib64 of CUDA, or nvidia/cu13/lib of NVIDIA's Python packages";

/// What to do if there is no driver.
const FIND_DRIVER: &str = "install NVIDIA's driver, or add its folder to LD_LIBRARY_PATH";

/// What to do if the driver is older than the compiler.
const SAME_VERSION: &str = "update the driver, or use libnvrtc.so and headers of the version of CUDA that nvidia-smi shows";

/// What to do if a library lacks a function.
const UPDATE: &str = "update NVIDIA's driver and CUDA";

/// What to do if the device has no memory.
const LESS_MEMORY: &str = "lower train_micro_batch_size_per_gpu, enable activation checkpointing, offload optimizer states, raise \
     the ZeRO stage, or use more devices";

/// What to do if compiled kernels cannot be kept or read.
const CLEAR_KERNELS: &str = "free space, remove the folder deepburn/kernels in XDG_CACHE_HOME or ~/.cache, or set \
     DEEPBURN_KERNEL_CACHE=off";

/// What to do if a kernel does not compile.
const REPORT: &str = "use CUDA 13.0, and report the error";

impl DeviceFault {
    /// Returns the cause in a text; if it is not a known one, the first line of the text.
    pub(crate) fn of(text: &str) -> Self {
        Self::known(text).unwrap_or_else(|| Self { cause: first_line(text), remedy: None })
    }

    /// Returns the known cause in a text of CubeCL 0.10.0, cudarc 0.19.10 or NVRTC.
    ///
    /// The last causes follow from earlier ones: a kernel does not compile without its headers.
    pub(crate) fn known(text: &str) -> Option<Self> {
        let fault = |cause: String, remedy| Some(Self { cause, remedy: Some(remedy) });
        let sizes = ["can't allocate buffer of size: ", "BufferTooBig { size: "];
        if let Some(bytes) = sizes.iter().find_map(|before| number_after(text, before)) {
            let megabytes = bytes as f64 / 1e6;
            return fault(
                format!("the device could not allocate an array of {megabytes:.2} MB"),
                LESS_MEMORY,
            );
        }
        if let Some(library) = text_between(text, "dynamically load the \"", "\"") {
            return match library {
                "nvrtc" => {
                    fault("CUDA's compiler, libnvrtc.so, was not found".into(), FIND_COMPILER)
                }
                "cuda" => fault("CUDA's driver, libcuda.so, was not found".into(), FIND_DRIVER),
                _ => fault(format!("the library {library} was not found"), UPDATE),
            };
        }
        if text.contains("CUDA installation not found") {
            return fault("CUDA's headers were not found".into(), FIND_HEADERS);
        }
        if let Some(header) = text_between(text, "cannot open source file \"", "\"") {
            return fault(format!("CUDA's header {header} was not found"), FIND_HEADERS);
        }
        if text.contains("CUDA_ERROR_UNSUPPORTED_PTX_VERSION") {
            let cause = "the driver is older than CUDA's compiler, libnvrtc.so \
                         (CUDA_ERROR_UNSUPPORTED_PTX_VERSION)";
            return fault(cause.into(), SAME_VERSION);
        }
        if let Some(function) = text_between(text, "Missing symbol ", ":") {
            return fault(format!("CUDA has no function {function}, so it is too old"), UPDATE);
        }
        if text.contains("Failed to write to chunk") {
            let cause = "a compiled kernel could not be written, as on a full disk";
            return fault(cause.into(), CLEAR_KERNELS);
        }
        if text.contains("Can't open chunk in table of contents") {
            return fault("the folder of compiled kernels is damaged".into(), CLEAR_KERNELS);
        }
        if text.contains("[Compilation Error]") {
            let error = text.lines().find(|line| line.contains("error:")).unwrap_or_default();
            return fault(format!("a kernel does not compile: {}", first_line(error)), REPORT);
        }
        None
    }
}

/// Returns the first line of a text that is not empty, cut at [`LONGEST_TEXT`] bytes.
fn first_line(text: &str) -> String {
    let line = text.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default();
    let end = (0..=LONGEST_TEXT.min(line.len())).rev().find(|end| line.is_char_boundary(*end));
    line[..end.unwrap_or(0)].to_owned()
}

/// Returns the part of a text between `before` and the next `after`.
fn text_between<'a>(text: &'a str, before: &str, after: &str) -> Option<&'a str> {
    Some(text.split_once(before)?.1.split_once(after)?.0)
}

/// Returns the number that follows `before` in a text.
fn number_after(text: &str, before: &str) -> Option<u64> {
    let (_, rest) = text.split_once(before)?;
    rest.split(|it: char| !it.is_ascii_digit()).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The texts that CubeCL, cudarc and NVRTC print, shortened.
    #[test]
    fn known_causes_are_found_and_have_remedies() {
        for (text, cause, remedy) in [
            (
                "called `Result::unwrap()` on an `Err` value: can't allocate buffer of size: 2147483648\n\
                 No backtrace available",
                "the device could not allocate an array of 2147.48 MB",
                "train_micro_batch_size_per_gpu",
            ),
            (
                "called `Result::unwrap()` on an `Err` value: BufferTooBig { size: 131072, backtrace: BackTrace }",
                "an array of 0.13 MB",
                "ZeRO stage",
            ),
            (
                "Unable to dynamically load the \"nvrtc\" shared library - searched for library names: \
                 [\"libnvrtc.so\", \"libnvrtc64.so\"]",
                "CUDA's compiler, libnvrtc.so, was not found",
                "LD_LIBRARY_PATH",
            ),
            (
                "Unable to dynamically load the \"cuda\" shared library - searched for library names: []",
                "CUDA's driver, libcuda.so, was not found",
                "install",
            ),
            (
                "\n        CUDA installation not found.\n        Please ensure that CUDA is installed",
                "CUDA's headers were not found",
                "CUDA_PATH",
            ),
            (
                "Error while reading data: use `try_into_data` instead\nCaused by:\n  [Compilation Error] \n    \
                 default_program(1): catastrophic error: cannot open source file \"cuda_bf16.h\"\n",
                "CUDA's header cuda_bf16.h was not found",
                "include/cuda_runtime.h",
            ),
            (
                "An error happened during execution\nCaused by:\n  Unable to load the PTX: \
                 DriverError(CUDA_ERROR_UNSUPPORTED_PTX_VERSION, \"the provided PTX\")",
                "the driver is older than CUDA's compiler",
                "nvidia-smi",
            ),
            (
                "Missing symbol cuMemAllocAsync: dlsym failed",
                "CUDA has no function cuMemAllocAsync",
                "update",
            ),
            (
                "Caused by:\n  [Compilation Error] \n    default_program(65): error: no operator \"-\" matches\n",
                "a kernel does not compile: default_program(65): error: no operator",
                "report",
            ),
        ] {
            let fault = DeviceFault::of(text);
            assert!(fault.cause.contains(cause), "{text}: {fault}");
            assert!(fault.remedy.is_some_and(|it| it.contains(remedy)), "{text}: {fault}");
            assert_eq!(fault.to_string().lines().count(), 1, "{fault}");
        }
        let other = DeviceFault::of("\n  the device is lost\nsecond line");
        assert_eq!(other, DeviceFault { cause: "the device is lost".into(), remedy: None });
        assert_eq!(DeviceFault::known("the device is lost"), None);
    }

    #[test]
    fn long_texts_are_cut_between_characters() {
        assert_eq!(first_line(""), "");
        let long = "é".repeat(LONGEST_TEXT);
        assert!(long.starts_with(&first_line(&long)) && first_line(&long).len() <= LONGEST_TEXT);
    }
}
