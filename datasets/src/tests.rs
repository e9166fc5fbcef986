//! What the tests of several modules use.

pub(crate) mod parquet_table;
mod test_data;

pub(crate) use test_data::test_data;
