use burn_flex::Flex;

use crate::optimizer::OptimizerOps;

impl OptimizerOps for Flex {}
