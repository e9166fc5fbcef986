//! Adds rows to a dense array on the device, in the order in which they are listed.
//!
//! The gradient of an embedding lists one row for each token. The rows of a token that occurs more
//! than once are added in their order, so that the sum has the same bits in every run, and the bits
//! of the same additions on the host:
//!
//! ```text
//! indices          7  2  7  9  7           a row of `values` for each
//! first launch     one cube per listed row
//!   is first       y  y  n  y  n           whether no earlier one has the same index
//!   next           2  5  4  5  5           the next one with the same index; 5 is none
//! second launch    one unit per element of `values`; only units of first rows add
//!   sum[7]         + values[0] + values[2] + values[4]
//! ```
//!
//! The indices stay on the device, so the host does not wait for them. The first launch compares
//! every pair of indices, with 256 units for each listed row: for 8192 tokens, 32 comparisons per
//! unit.

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::device_buffer::{CUBE_DIM, DeviceBuffer, DeviceDType, cubes, with_element};

/// Rows to add to a part of a table.
#[derive(Debug)]
pub struct AddedRows<'a> {
    /// The number of the table's row to which each row is added, in 32 bits. Rows outside of the
    /// part are ignored.
    pub indices: Handle,
    /// The rows, one after the other.
    pub values: &'a DeviceBuffer,
    /// The number of elements of a row.
    pub row_len: usize,
}

/// Adds rows to `sum`, in f32. `sum` holds elements `start..` of the table's flat order. A row that
/// crosses an end of the part is cut.
///
/// The launches are queued, so the host does not wait.
///
/// # Panics
/// Panics if `sum` is not f32, if there are fewer indices than rows, or if the rows that overlap
/// the part have 2^32 elements or more.
pub fn add_rows<R: Runtime>(
    client: &ComputeClient<R>,
    sum: &DeviceBuffer,
    start: usize,
    rows: AddedRows<'_>,
) {
    let AddedRows { indices, values, row_len } = rows;
    let dtype = sum.dtype();
    assert!(dtype == DeviceDType::F32, "rows are added to {dtype:?}, must be F32");
    if sum.is_empty() || values.is_empty() {
        return;
    }
    let count = values.len() / row_len;
    let (bytes, needed) = (indices.size_in_used(), (count * size_of::<u32>()) as u64);
    assert!(
        needed <= bytes,
        "{count} rows need {needed} bytes of indices, and {bytes} bytes were given"
    );
    let (first, last) = (start / row_len, (start + sum.len() - 1) / row_len);
    let part = TablePart { first, rows: last - first + 1, skipped: start % row_len };
    let room = u32::MAX as usize;
    assert!(
        part.rows.saturating_mul(row_len) <= room && last <= room,
        "{} rows of {row_len} elements from row {first} on are beyond the kernel's positions of 32 bits; use more \
         ranks at a higher ZeRO stage, so that a rank owns fewer rows, or the backend flex",
        part.rows
    );
    let links = client.empty(count * LINK * size_of::<u32>());
    let (each_row, dim) = cubes(client, count * CUBE_DIM as usize);
    let (each_element, _) = cubes(client, values.len());
    // SAFETY: units check that their rows and elements exist, all rows have an index and a link,
    // and additions check that their place is in `sum`.
    unsafe {
        let indices = || ArrayArg::from_raw_parts(indices.clone(), count);
        let links = || ArrayArg::from_raw_parts(links.clone(), count * LINK);
        link_kernel::launch_unchecked::<R>(
            client,
            each_row,
            dim,
            indices(),
            part.first as u32,
            part.rows as u32,
            links(),
        );
        with_element!(values.dtype(), V => {
            add_kernel::launch_unchecked::<V, R>(
                client,
                each_element,
                dim,
                sum.arg(),
                indices(),
                links(),
                values.arg(),
                row_len,
                part.first as u32,
                part.skipped,
            );
        });
    }
}

/// The number of words of a link: whether the row adds, and the next row with the same index.
const LINK: usize = 2;

/// The rows of the table that overlap the dense array.
struct TablePart {
    /// The number of the first row.
    first: usize,
    /// The number of rows.
    rows: usize,
    /// The number of elements of the first row that come before the array.
    skipped: usize,
}

/// Writes the link of one listed row per cube. Rows outside of the `rows` rows from `first_row` on
/// are not compared with others.
#[cube(launch_unchecked)]
fn link_kernel(indices: &Array<u32>, first_row: u32, rows: u32, links: &mut Array<u32>) {
    let mut earlier = SharedMemory::<u32>::new(256usize);
    let mut nearest = SharedMemory::<u32>::new(256usize);
    let unit = UNIT_POS as usize;
    let width = CUBE_DIM as usize;
    let count = indices.len();
    let mine = CUBE_POS;
    // There may be more cubes than rows. All units of a cube reach every barrier.
    let mut row = u32::new(0);
    let mut is_in_part = u32::new(0);
    if mine < count {
        row = indices[mine];
        if row >= first_row && row - first_row < rows {
            is_in_part = u32::new(1);
        }
    }
    let mut has_earlier = u32::new(0);
    let mut next = count as u32;
    let mut i = unit;
    if is_in_part == 1u32 {
        while i < count {
            if indices[i] == row {
                if i < mine {
                    has_earlier = u32::new(1);
                }
                if i > mine && (i as u32) < next {
                    next = i as u32;
                }
            }
            i += width;
        }
    }
    earlier[unit] = has_earlier;
    nearest[unit] = next;
    let mut half = width / 2;
    while half > 0 {
        sync_cube();
        if unit < half {
            earlier[unit] = earlier[unit] | earlier[unit + half];
            if nearest[unit + half] < nearest[unit] {
                nearest[unit] = nearest[unit + half];
            }
        }
        half /= 2;
    }
    if unit == 0 && mine < count {
        links[mine * 2] = is_in_part & (1u32 - earlier[0]);
        links[mine * 2 + 1] = nearest[0];
    }
}

/// Adds one column of all rows with the same index per unit. Only the units of a first row add.
#[cube(launch_unchecked)]
fn add_kernel<V: Float>(
    sum: &mut Array<f32>,
    indices: &Array<u32>,
    links: &Array<u32>,
    values: &Array<V>,
    row_len: usize,
    first_row: u32,
    skipped: usize,
) {
    let element = ABSOLUTE_POS;
    if element < values.len() {
        let listed = element / row_len;
        let column = element % row_len;
        if links[listed * 2] == 1u32 {
            let place = (indices[listed] - first_row) as usize * row_len + column;
            if place >= skipped {
                let place = place - skipped;
                if place < sum.len() {
                    let count = indices.len();
                    let mut total = sum[place];
                    let mut i = listed;
                    while i < count {
                        total += f32::cast_from(values[i * row_len + column]);
                        i = links[i * 2 + 1] as usize;
                    }
                    sum[place] = total;
                }
            }
        }
    }
}
