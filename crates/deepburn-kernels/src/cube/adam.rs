//! Adam and AdamW in one launch.

use cubecl::prelude::*;

use super::buffer::{Buffer, ElementType, cubes, with_element};
use crate::AdamStep;

/// The buffers of one share that Adam updates, of one length.
#[derive(Debug)]
pub struct AdamBuffers<'a> {
    /// The parameter, f32.
    pub param: &'a Buffer,
    /// First moment, f32.
    pub m: &'a Buffer,
    /// Second moment, f32.
    pub v: &'a Buffer,
    /// Gets the updated parameter in 16 bits.
    pub working: Option<&'a Buffer>,
}

/// One fused pass, as [`adam`](crate::adam()) on the CPU.
///
/// # Panics
/// When the buffers differ in length or those that are updated are not f32.
pub fn adam<R: Runtime>(
    client: &ComputeClient<R>,
    step: &AdamStep,
    grad_scale: f32,
    grad: &Buffer,
    share: AdamBuffers<'_>,
) {
    let AdamBuffers { param, m, v, working } = share;
    let len = param.len();
    for (name, buffer) in
        [("grad", grad), ("m", m), ("v", v)].into_iter().chain(working.map(|w| ("working", w)))
    {
        assert!(
            buffer.len() == len,
            "adam: `{name}` has {} elements and `param` has {len}; a share's buffers have one length",
            buffer.len()
        );
    }
    for (name, buffer) in [("param", param), ("m", m), ("v", v)] {
        assert!(
            buffer.dtype() == ElementType::F32,
            "adam: `{name}` is {:?}, must be F32",
            buffer.dtype()
        );
    }
    if len == 0 {
        return;
    }
    let scalars = Buffer::new(
        client.create_from_slice(f32::as_bytes(&step.scalars(grad_scale))),
        SCALARS,
        ElementType::F32,
    );
    let (count, dim) = cubes(client, len);
    let written = working.unwrap_or(param).dtype();
    // Without a working copy the last argument is a buffer that the kernel leaves alone.
    let unused = Buffer::empty(client, 1, written);
    // SAFETY: every unit checks that its element exists.
    unsafe {
        with_element!(grad.dtype(), G => with_element!(written, W => {
            adam_kernel::launch_unchecked::<G, W, R>(
                client,
                count,
                dim,
                scalars.arg(),
                grad.arg(),
                param.arg(),
                m.arg(),
                v.arg(),
                working.unwrap_or(&unused).arg(),
                working.is_some(),
            );
        }));
    }
}

/// Length of [`AdamStep::scalars`].
const SCALARS: usize = 9;

#[cube(launch_unchecked)]
fn adam_kernel<G: Float, W: Float>(
    scalars: &Array<f32>,
    grad: &Array<G>,
    param: &mut Array<f32>,
    m: &mut Array<f32>,
    v: &mut Array<f32>,
    working: &mut Array<W>,
    #[comptime] writes_working: bool,
) {
    let i = ABSOLUTE_POS;
    if i >= param.len() {
        terminate!();
    }
    let gain1 = scalars[0];
    let decayed = param[i] * scalars[6];
    let g = f32::cast_from(grad[i]) * scalars[8] + scalars[7] * decayed;
    // From the nearer end, so that a gain of 1 gives the gradient to the bit.
    let old = m[i];
    let first = if gain1 < 0.5 { old + gain1 * (g - old) } else { g - (g - old) * (1.0 - gain1) };
    let second = v[i] * scalars[1] + scalars[2] * g * g;
    let denominator = f32::sqrt(second) / scalars[5] + scalars[3];
    let updated = decayed - scalars[4] * first / denominator;
    m[i] = first;
    v[i] = second;
    param[i] = updated;
    if comptime![writes_working] {
        working[i] = W::cast_from(updated);
    }
}
