//! Assigns a device to each rank.
//!
//! Main type: [`Devices`], the devices of this host that the job may use: all [`VisibleDevices`],
//! or the ones that `training.devices` lists. Devices are assigned by local rank. If there are more
//! ranks than devices, ranks share them. Devices are counted without opening one, because an open
//! CUDA device takes hundreds of megabytes.
//!
//! ```text
//! ranks     0  1  2  3  4
//! devices   0  1  0  1  0      two visible devices
//! devices   3  1  3  1  3      "devices": [3, 1]
//! ```

use deepburn_config::{TrainingJob, counted};

use crate::failure::Failure;
use crate::job::device_fault::DeviceFault;

/// The devices of this host that a backend can use.
pub(crate) struct VisibleDevices<D> {
    /// The devices, by index.
    pub(crate) devices: Vec<D>,
    /// Why counting them failed; `None` if it did not.
    failure: Option<DeviceFault>,
}

impl<D> From<Vec<D>> for VisibleDevices<D> {
    fn from(devices: Vec<D>) -> Self {
        Self { devices, failure: None }
    }
}

/// The devices of this host that a job uses. There is at least one.
pub(crate) struct Devices<D> {
    /// Devices in the order of local ranks.
    chosen: Vec<D>,
}

impl<D: Clone> Devices<D> {
    /// Chooses the devices that the job lists, or all of `visible`. Logs a note if the
    /// `local_ranks` ranks of this host have to share them.
    ///
    /// # Errors
    /// Returns a user's mistake if no device is visible, or if a device that the job lists is not
    /// visible.
    pub(crate) fn choose(
        visible: &VisibleDevices<D>,
        job: &TrainingJob,
        local_ranks: usize,
    ) -> Result<Self, Failure> {
        let (backend, num_visible) = (job.placement.backend.name(), visible.devices.len());
        if num_visible == 0 {
            let failure = visible.failure.as_ref();
            let why = failure.map(|fault| format!(": {}", fault.cause)).unwrap_or_default();
            let remedy = failure.and_then(|fault| fault.remedy);
            return Err(Failure::mistake(format!(
                "training.backend: \"{backend}\" sees no device{why}; {}, or use \"flex\"",
                remedy.unwrap_or("check the driver and CUDA_VISIBLE_DEVICES")
            )));
        }
        let all: Vec<_> = (0..num_visible).collect();
        let chosen = job.placement.devices.as_deref().unwrap_or(&all).iter().map(|&index| {
            visible.devices.get(index).cloned().ok_or_else(|| {
                Failure::mistake(format!(
                    "training.devices: {index} is not visible: \"{backend}\" sees {num_visible} on this host; use indices \
                     from 0 to {}, or \"auto\"",
                    num_visible - 1
                ))
            })
        });
        let devices = Self { chosen: chosen.collect::<Result<_, _>>()? };
        let num_devices = devices.chosen.len();
        if local_ranks > num_devices && !job.placement.backend.is_host() {
            let devices = counted(num_devices, "device");
            tracing::info!("training.devices: {local_ranks} ranks share {devices}");
        }
        Ok(devices)
    }

    /// Returns the device of a local rank.
    ///
    /// If there are more local ranks than devices, the assignment starts again at the first device.
    pub(crate) fn of(&self, local_rank: usize) -> &D {
        &self.chosen[local_rank % self.chosen.len()]
    }
}

/// Applies `training.float32_matmul_precision` to all products of this process.
pub(crate) fn set_matmul_precision(job: &TrainingJob) {
    deepburn::ops::allow_tf32(job.placement.float32_matmul_precision.allows_tf32());
}

/// Evaluates an expression that is generic over the backend, a type, for the backend of a job and
/// its visible devices.
macro_rules! with_backend {
    ($backend:expr, $type:ident, $devices:ident => $body:expr) => {
        match $backend {
            #[cfg(feature = "cuda")]
            deepburn_config::Backend::Cuda => {
                type $type = burn_cuda::Cuda<f32, i32>;
                let $devices = &$crate::job::devices::cuda_devices();
                $body
            }
            #[cfg(feature = "tch")]
            deepburn_config::Backend::Tch => {
                type $type = burn_tch::LibTorch<f32>;
                let $devices = &$crate::job::devices::VisibleDevices::from(vec![
                    burn_tch::LibTorchDevice::Cpu,
                ]);
                $body
            }
            #[cfg(feature = "wgpu")]
            deepburn_config::Backend::Wgpu => {
                type $type = burn_wgpu::Wgpu<f32, i32>;
                let $devices = &$crate::job::devices::VisibleDevices::from(
                    $crate::job::devices::wgpu_devices(),
                );
                $body
            }
            // Backends that are not compiled in were refused in the preparation.
            _ => {
                type $type = burn_flex::Flex;
                let $devices =
                    &$crate::job::devices::VisibleDevices::from(vec![burn_flex::FlexDevice]);
                $body
            }
        }
    };
}
pub(crate) use with_backend;

/// Returns the CUDA devices that `CUDA_VISIBLE_DEVICES` allows.
#[cfg(feature = "cuda")]
pub(crate) fn cuda_devices() -> VisibleDevices<burn_cuda::CudaDevice> {
    use cubecl::Runtime;

    use crate::job::device_panics::caught;
    use crate::job::kernel_cache::keep_kernels;

    // Both panic if the CUDA driver library lacks a function, the first one if a `cubecl.toml`
    // cannot be read, and the second one if there is no library.
    let kept = caught(keep_kernels);
    let counted = caught(|| cubecl::cuda::CudaRuntime::enumerate_devices(0, &()).len());
    let count = kept.result.and(counted.result).unwrap_or(0);
    VisibleDevices {
        devices: (0..count).map(|index| burn_cuda::CudaDevice { index }).collect(),
        failure: kept.panics.into_iter().chain(counted.panics).next(),
    }
}

/// Returns the adapters of the best available kind: discrete GPUs, else integrated ones, else
/// virtual ones. Kinds are not mixed, because ranks wait for each other, and a slower GPU would
/// slow all of them down.
///
/// If there is a single adapter, or only one that computes on the CPU, the result is wgpu's default
/// device, which `CUBECL_WGPU_DEFAULT_DEVICE` overrides.
#[cfg(feature = "wgpu")]
pub(crate) fn wgpu_devices() -> Vec<burn_wgpu::WgpuDevice> {
    use burn_wgpu::graphics::{AutoGraphicsApi, GraphicsApi};
    use burn_wgpu::{WgpuDevice, WgpuRuntime};
    use cubecl::Runtime;

    let count = |kind| WgpuRuntime::enumerate_devices(kind, &AutoGraphicsApi::backend()).len();
    // CubeCL numbers the kinds in this order.
    type OfKind = fn(usize) -> WgpuDevice;
    let of_kind: [OfKind; 3] =
        [WgpuDevice::DiscreteGpu, WgpuDevice::IntegratedGpu, WgpuDevice::VirtualGpu];
    let overridden = std::env::var_os("CUBECL_WGPU_DEFAULT_DEVICE").is_some();
    let kinds = (0u16..).zip(of_kind);
    let best = kinds.map(|(kind, device)| (count(kind), device)).find(|(n, _)| *n > 0);
    match best {
        Some((count, device)) if count > 1 && !overridden => (0..count).map(device).collect(),
        _ => vec![WgpuDevice::DefaultDevice],
    }
}

#[cfg(test)]
mod tests {
    use deepburn_config::{Job, JobRequest};

    use super::*;

    fn choose(visible: usize, devices: &str, ranks: usize) -> Result<Vec<usize>, String> {
        let text = format!(
            r#"{{"training": {{"backend": "cuda", "devices": {devices}, "ranks": {ranks}}}}}"#
        );
        let folder = std::path::Path::new("");
        let (job, _) = Job::parse(&text, "job.json", folder, &JobRequest::default()).unwrap();
        let visible: Vec<_> = (0..visible).map(|index| 10 + index).collect();
        let visible = VisibleDevices::from(visible);
        let devices = Devices::choose(&visible, &job.training, ranks).map_err(|e| e.to_string())?;
        Ok((0..ranks).map(|rank| *devices.of(rank)).collect())
    }

    #[test]
    fn ranks_take_devices_by_local_rank() {
        assert_eq!(choose(4, "\"auto\"", 3), Ok(vec![10, 11, 12]));
        assert_eq!(choose(1, "\"auto\"", 3), Ok(vec![10, 10, 10]));
        assert_eq!(choose(2, "\"auto\"", 5), Ok(vec![10, 11, 10, 11, 10]));
        assert_eq!(choose(4, "[3, 1]", 3), Ok(vec![13, 11, 13]));
    }

    #[test]
    fn rejects_devices_that_are_not_visible() {
        let error = choose(2, "[0, 2]", 2).unwrap_err();
        assert!(error.contains("training.devices: 2 is not visible"), "{error}");
        assert!(error.contains("sees 2 on this host"), "{error}");
        let error = choose(0, "\"auto\"", 1).unwrap_err();
        assert!(error.contains("\"cuda\" sees no device; check the driver"), "{error}");
    }

    #[test]
    fn the_reason_why_no_device_was_counted_is_named() {
        let folder = std::path::Path::new("");
        let text = r#"{"training": {"backend": "cuda"}}"#;
        let (job, _) = Job::parse(text, "job.json", folder, &JobRequest::default()).unwrap();
        let error = |panic: &str| {
            let failure = Some(DeviceFault::of(panic));
            let visible = VisibleDevices::<usize> { devices: Vec::new(), failure };
            Devices::choose(&visible, &job.training, 1).err().unwrap().to_string()
        };
        let missing = error("Unable to dynamically load the \"cuda\" shared library");
        assert!(missing.contains("sees no device: CUDA's driver, libcuda.so, was"), "{missing}");
        assert!(missing.contains("; install NVIDIA's driver"), "{missing}");
        let other = error("the device is lost");
        assert!(other.contains("the device is lost; check the driver"), "{other}");
    }
}
