//! Wrappers of the MPI functions that the engine uses. All return codes are checked.
//!
//! This module contains all `unsafe` code for messages. [`Mpi`] is not `Send`, because MPI is
//! initialized with `MPI_THREAD_FUNNELED`, which only allows calls on the thread that initialized
//! it.
//!
//! | Purpose | Functions |
//! |---|---|
//! | start and end | `MPI_Init_thread`, `MPI_Comm_dup`, `MPI_Comm_set_errhandler`, `MPI_Finalize` |
//! | data and control messages | `MPI_Isend`, `MPI_Irecv`, `MPI_Test` |
//! | control messages of unknown size | `MPI_Iprobe`, `MPI_Get_count`, `MPI_Recv` |
//!
//! After the start, only `MPI_Recv` and `MPI_Finalize` are blocking functions, and `MPI_Recv` is
//! only called for a message that has arrived. The error handler is set to `MPI_ERRORS_RETURN`, so
//! that errors are returned; MPI's default handler ends the process. The MPI 3.1 standard leaves
//! the state of MPI undefined after an error, so the engine ends the run.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ptr;

use bytes::Bytes;
use mpi_sys as ffi;

/// A failed MPI call.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MpiError {
    /// MPI returned an error.
    #[error("{call} failed: {reason}")]
    Call {
        /// The MPI function.
        call: &'static str,
        /// MPI's description of the error.
        reason: String,
    },

    /// MPI was built without the required thread support.
    #[error(
        "this MPI library allows no threads beside its own (MPI_THREAD_FUNNELED was asked for, level \
         {granted} was granted); use a build of MPI with thread support"
    )]
    Threads {
        /// The level that was granted.
        granted: c_int,
    },
}

/// The initialized MPI library with a private communicator of all ranks.
pub(crate) struct Mpi {
    /// A duplicate of the world communicator. It separates these messages from messages of other
    /// code in the process.
    communicator: ffi::MPI_Comm,
    /// The rank of this process.
    rank: usize,
    /// The number of processes.
    world_size: usize,
    /// Keeps the value on the thread that initialized MPI.
    _thread: PhantomData<*const ()>,
}

/// The kind of a message. Messages of the same kind between two ranks arrive in the order in which
/// they were sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MessageKind {
    /// A control message, whose size the receiver does not know in advance.
    Control = 1,
    /// A part of an array of a collective, whose size the receiver knows in advance.
    Data = 2,
    /// A part of an array of a message between two ranks, whose size the receiver knows in advance.
    Letter = 3,
}

/// A pending message. The memory that it reads or writes must stay valid until it [is
/// complete](Mpi::is_complete). The owner of an `MpiRequest` also owns that memory.
#[derive(Debug)]
pub(crate) struct MpiRequest(ffi::MPI_Request);

impl Mpi {
    /// Initializes MPI on this thread.
    ///
    /// # Errors
    /// Returns an error if MPI cannot be initialized, or if it was built without support for
    /// threads.
    pub(crate) fn init() -> Result<Self, MpiError> {
        let mut granted = 0;
        // SAFETY: argc and argv may be null since MPI-2; `granted` is valid for a write. The caller
        // starts one communication thread per process, so this runs once.
        let code = unsafe {
            ffi::MPI_Init_thread(
                ptr::null_mut(),
                ptr::null_mut(),
                ffi::MPI_THREAD_FUNNELED as c_int,
                &mut granted,
            )
        };
        check("MPI_Init_thread", code)?;
        if granted < ffi::MPI_THREAD_FUNNELED as c_int {
            return Err(MpiError::Threads { granted });
        }
        let mut communicator = MaybeUninit::uninit();
        let (mut rank, mut size) = (0, 0);
        // SAFETY: MPI is initialized; all pointers are valid for a write. By default errors of MPI
        // end the process, so the handler is set before anything else can fail.
        unsafe {
            let world = ffi::RSMPI_COMM_WORLD;
            let code = ffi::MPI_Comm_set_errhandler(world, ffi::RSMPI_ERRORS_RETURN);
            check("MPI_Comm_set_errhandler", code)?;
            check("MPI_Comm_dup", ffi::MPI_Comm_dup(world, communicator.as_mut_ptr()))?;
            check("MPI_Comm_rank", ffi::MPI_Comm_rank(world, &mut rank))?;
            check("MPI_Comm_size", ffi::MPI_Comm_size(world, &mut size))?;
        }
        // SAFETY: MPI_Comm_dup succeeded and wrote it.
        let communicator = unsafe { communicator.assume_init() };
        let (rank, world_size) = (rank as usize, size as usize);
        Ok(Self { communicator, rank, world_size, _thread: PhantomData })
    }

    /// Returns the rank, from 0.
    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the number of ranks.
    pub(crate) fn world_size(&self) -> usize {
        self.world_size
    }

    /// Starts to send `bytes`, at most `c_int::MAX` of them, and returns immediately.
    ///
    /// # Safety
    /// `bytes` must stay alive and unchanged until the request is complete.
    ///
    /// # Errors
    /// Returns an error if MPI fails.
    pub(crate) unsafe fn send(
        &self,
        bytes: &[u8],
        to: usize,
        kind: MessageKind,
    ) -> Result<MpiRequest, MpiError> {
        let mut request = MaybeUninit::uninit();
        // SAFETY: the buffer is valid for `len` bytes, for as long as the caller promises.
        let code = unsafe {
            ffi::MPI_Isend(
                bytes.as_ptr().cast::<c_void>(),
                bytes.len() as c_int,
                ffi::RSMPI_UINT8_T,
                to as c_int,
                kind as c_int,
                self.communicator,
                request.as_mut_ptr(),
            )
        };
        check("MPI_Isend", code)?;
        // SAFETY: the call succeeded and wrote it.
        Ok(MpiRequest(unsafe { request.assume_init() }))
    }

    /// Starts to receive a message of `len` bytes, at most `c_int::MAX`, and returns immediately.
    ///
    /// # Safety
    /// `target` must be valid for writes of `len` bytes until the request is complete, and nothing
    /// else may access them.
    ///
    /// # Errors
    /// Returns an error if MPI fails.
    pub(crate) unsafe fn receive(
        &self,
        target: *mut u8,
        len: usize,
        from: usize,
        kind: MessageKind,
    ) -> Result<MpiRequest, MpiError> {
        let mut request = MaybeUninit::uninit();
        // SAFETY: as the caller promises.
        let code = unsafe {
            ffi::MPI_Irecv(
                target.cast::<c_void>(),
                len as c_int,
                ffi::RSMPI_UINT8_T,
                from as c_int,
                kind as c_int,
                self.communicator,
                request.as_mut_ptr(),
            )
        };
        check("MPI_Irecv", code)?;
        // SAFETY: the call succeeded and wrote it.
        Ok(MpiRequest(unsafe { request.assume_init() }))
    }

    /// Lets MPI make progress and returns true if the request is complete. A complete request stays
    /// complete, so this function can be called repeatedly.
    ///
    /// # Errors
    /// Returns an error if MPI fails. The memory of the message must then not be freed.
    pub(crate) fn is_complete(&self, request: &mut MpiRequest) -> Result<bool, MpiError> {
        let mut complete = 0;
        // SAFETY: the request is one of this library's; it becomes null when it is complete.
        let code =
            unsafe { ffi::MPI_Test(&mut request.0, &mut complete, ffi::RSMPI_STATUS_IGNORE) };
        check("MPI_Test", code)?;
        Ok(complete != 0)
    }

    /// Receives a control message that has arrived from any rank, and returns it with this rank;
    /// `None` if there is none.
    ///
    /// # Errors
    /// Returns an error if MPI fails.
    pub(crate) fn take_arrived(&self) -> Result<Option<(usize, Vec<u8>)>, MpiError> {
        let (mut flag, mut len) = (0, 0);
        let mut status = MaybeUninit::<ffi::MPI_Status>::uninit();
        // SAFETY: all pointers are valid for writes.
        let code = unsafe {
            ffi::MPI_Iprobe(
                ffi::MPI_ANY_SOURCE as c_int,
                MessageKind::Control as c_int,
                self.communicator,
                &mut flag,
                status.as_mut_ptr(),
            )
        };
        check("MPI_Iprobe", code)?;
        if flag == 0 {
            return Ok(None);
        }
        // SAFETY: with the flag set the status was written.
        let code = unsafe { ffi::MPI_Get_count(status.as_ptr(), ffi::RSMPI_UINT8_T, &mut len) };
        check("MPI_Get_count", code)?;
        // SAFETY: as above.
        let from = unsafe { status.assume_init() }.MPI_SOURCE;
        let mut bytes = vec![0_u8; len as usize];
        // SAFETY: the buffer is valid for its length. The message is there, so the call returns.
        let code = unsafe {
            ffi::MPI_Recv(
                bytes.as_mut_ptr().cast::<c_void>(),
                len,
                ffi::RSMPI_UINT8_T,
                from,
                MessageKind::Control as c_int,
                self.communicator,
                ffi::RSMPI_STATUS_IGNORE,
            )
        };
        check("MPI_Recv", code)?;
        Ok(Some((from as usize, bytes)))
    }

    /// Finalizes MPI. This is collective: it returns when all ranks have called it.
    ///
    /// # Errors
    /// Returns an error if MPI fails.
    pub(crate) fn finalize(self) -> Result<(), MpiError> {
        // SAFETY: MPI is initialized and this is its thread; nothing is under way.
        check("MPI_Finalize", unsafe { ffi::MPI_Finalize() })
    }
}

/// Converts a return code to a result, with MPI's description of the error.
fn check(call: &'static str, code: c_int) -> Result<(), MpiError> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    // The buffer has one more byte than MPI writes, so the text is zero-terminated even if this
    // call fails.
    let mut text = [0 as c_char; ffi::MPI_MAX_ERROR_STRING as usize + 1];
    let mut len = 0;
    // SAFETY: the buffer is as long as the library asks for, and zero-terminated in any case.
    let reason = unsafe {
        ffi::MPI_Error_string(code, text.as_mut_ptr(), &mut len);
        CStr::from_ptr(text.as_ptr()).to_string_lossy().into_owned()
    };
    Err(MpiError::Call { call, reason })
}

/// A control message that is being sent, together with its memory.
#[derive(Debug)]
pub(crate) struct Posted {
    /// The send request.
    request: MpiRequest,
    /// The message, which MPI may read until the request is complete.
    _bytes: Bytes,
}

impl Posted {
    /// Sends a control message without waiting. The result must be kept until it is complete.
    ///
    /// # Errors
    /// Returns an error if MPI fails.
    pub(crate) fn send(mpi: &Mpi, bytes: Bytes, to: usize) -> Result<Self, MpiError> {
        // SAFETY: the bytes are kept beside the request; `Posted` is dropped when it is complete,
        // or forgotten with the process (`Link`).
        let request = unsafe { mpi.send(&bytes, to, MessageKind::Control)? };
        Ok(Self { request, _bytes: bytes })
    }

    /// Returns true if the message was sent and its memory can be reused.
    ///
    /// # Errors
    /// Returns an error if MPI fails.
    pub(crate) fn is_complete(&mut self, mpi: &Mpi) -> Result<bool, MpiError> {
        mpi.is_complete(&mut self.request)
    }
}
