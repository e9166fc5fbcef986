//! Reading several tensors at once.

use burn_backend::ops::{TransactionOps, TransactionPrimitive, TransactionPrimitiveData};
use burn_backend::{Backend, ExecutionError};

use crate::{Zero, ZeroTensor};

impl<B: Backend> TransactionOps<Zero<B>> for Zero<B> {
    fn tr_execute(
        transaction: TransactionPrimitive<Zero<B>>,
    ) -> impl Future<Output = Result<TransactionPrimitiveData, ExecutionError>> + Send {
        let floats = transaction.read_floats.into_iter().map(ZeroTensor::into_full).collect();
        B::tr_execute(TransactionPrimitive::<B>::new(
            floats,
            transaction.read_qfloats,
            transaction.read_ints,
            transaction.read_bools,
        ))
    }
}
