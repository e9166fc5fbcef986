//! Reads several tensors in one synchronization with the device.
//!
//! Reading a sharded parameter gathers it, so all ranks must read the same tensors in the same
//! order.

use burn_backend::ExecutionError;
use burn_backend::ops::{TransactionOps, TransactionPrimitive, TransactionPrimitiveData};
use deepburn_ops::MatmulOps;

use crate::decorator::{Sharded, ZeroTensor};
use crate::session::Leased;

impl<B: MatmulOps> TransactionOps<Sharded<B>> for Sharded<B> {
    fn tr_execute(
        transaction: TransactionPrimitive<Sharded<B>>,
    ) -> impl Future<Output = Result<TransactionPrimitiveData, ExecutionError>> + Send {
        let floats = transaction.read_floats.into_iter().map(ZeroTensor::into_full).collect();
        B::tr_execute(TransactionPrimitive::<B>::new(
            floats,
            transaction.read_qfloats,
            transaction.read_ints.into_iter().map(Leased::into_inner).collect(),
            transaction.read_bools.into_iter().map(Leased::into_inner).collect(),
        ))
    }
}
