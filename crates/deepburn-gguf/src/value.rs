//! The typed values of metadata.
//!
//! The numbers of the types are `gguf_metadata_value_type` in
//! <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>.

use crate::error::shortened;

/// Expands a macro with the list of number types: variant, Rust type and number in files.
macro_rules! with_number_types {
    ($expand:ident) => {
        $expand! {
            U8, u8, 0, "Unsigned, 8 bits.";
            I8, i8, 1, "Signed, 8 bits.";
            U16, u16, 2, "Unsigned, 16 bits.";
            I16, i16, 3, "Signed, 16 bits.";
            U32, u32, 4, "Unsigned, 32 bits.";
            I32, i32, 5, "Signed, 32 bits.";
            F32, f32, 6, "Single precision.";
            // 7 to 9 are truth values, texts and arrays: `BOOL`, `STRING` and `ARRAY`.
            U64, u64, 10, "Unsigned, 64 bits.";
            I64, i64, 11, "Signed, 64 bits.";
            F64, f64, 12, "Double precision.";
        }
    };
}
pub(crate) use with_number_types;

/// Defines [`Value`] and [`Array`].
macro_rules! values {
    ($($variant:ident, $type:ty, $id:literal, $doc:literal;)*) => {
        /// A value of metadata.
        #[derive(Debug, Clone, PartialEq)]
        #[non_exhaustive]
        pub enum Value {
            $(#[doc = $doc] $variant($type),)*
            /// A truth value.
            Bool(bool),
            /// A text.
            String(String),
            /// Values of one type.
            Array(Array),
        }

        /// The elements of an array, all of one type. Arrays of arrays are not supported; llama.cpp
        /// rejects them too.
        #[derive(Debug, Clone, PartialEq)]
        #[non_exhaustive]
        pub enum Array {
            $(#[doc = $doc] $variant(Vec<$type>),)*
            /// Truth values.
            Bool(Vec<bool>),
            /// Texts.
            String(Vec<String>),
        }

        impl Value {
            /// Returns the number of the type in files.
            pub(crate) fn type_id(&self) -> u32 {
                match self {
                    $(Self::$variant(_) => $id,)*
                    Self::Bool(_) => BOOL,
                    Self::String(_) => STRING,
                    Self::Array(_) => ARRAY,
                }
            }

            /// Returns the value for a message, which a malformed file cannot make long.
            pub(crate) fn shown(&self) -> String {
                match self {
                    $(Self::$variant(value) => value.to_string(),)*
                    Self::Bool(value) => value.to_string(),
                    Self::String(text) => format!("`{}`", shortened(text)),
                    Self::Array(array) => format!("a list of {} values", array.len()),
                }
            }

            /// Appends the value without its type.
            pub(crate) fn encode(&self, into: &mut Vec<u8>) {
                match self {
                    $(Self::$variant(value) => into.extend(value.to_le_bytes()),)*
                    Self::Bool(value) => into.push(u8::from(*value)),
                    Self::String(text) => encode_string(text, into),
                    Self::Array(array) => array.encode(into),
                }
            }
        }

        impl Array {
            /// Returns the number of the elements' type in files.
            pub(crate) fn type_id(&self) -> u32 {
                match self {
                    $(Self::$variant(_) => $id,)*
                    Self::Bool(_) => BOOL,
                    Self::String(_) => STRING,
                }
            }

            /// Returns the number of elements.
            #[must_use]
            pub fn len(&self) -> usize {
                match self {
                    $(Self::$variant(values) => values.len(),)*
                    Self::Bool(values) => values.len(),
                    Self::String(texts) => texts.len(),
                }
            }

            /// Returns whether there are no elements.
            #[must_use]
            pub fn is_empty(&self) -> bool {
                self.len() == 0
            }

            /// Appends the type, the number of elements and the elements.
            fn encode(&self, into: &mut Vec<u8>) {
                into.extend(self.type_id().to_le_bytes());
                into.extend((self.len() as u64).to_le_bytes());
                match self {
                    $(Self::$variant(values) => {
                        into.extend(values.iter().flat_map(|value| value.to_le_bytes()));
                    })*
                    Self::Bool(values) => into.extend(values.iter().map(|value| u8::from(*value))),
                    Self::String(texts) => texts.iter().for_each(|text| encode_string(text, into)),
                }
            }
        }
    };
}

with_number_types!(values);

/// The number of the type of truth values, which take one byte.
pub(crate) const BOOL: u32 = 7;
/// The number of the type of texts: the length in bytes as `u64`, then UTF-8.
pub(crate) const STRING: u32 = 8;
/// The number of the type of arrays: the type of the elements, their number as `u64`, then the
/// elements.
pub(crate) const ARRAY: u32 = 9;

/// Appends a text: its length in bytes, then its bytes.
pub(crate) fn encode_string(text: &str, into: &mut Vec<u8>) {
    into.extend((text.len() as u64).to_le_bytes());
    into.extend(text.as_bytes());
}

impl Value {
    /// Returns the text, or `None` if the value has another type.
    #[must_use]
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::String(text) => Some(text),
            _ => None,
        }
    }

    /// Returns an integer of any width, or `None` if the value is negative or has another type.
    #[must_use]
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Self::U8(value) => Some(value.into()),
            Self::U16(value) => Some(value.into()),
            Self::U32(value) => Some(value.into()),
            Self::U64(value) => Some(value),
            Self::I8(value) => value.try_into().ok(),
            Self::I16(value) => value.try_into().ok(),
            Self::I32(value) => value.try_into().ok(),
            Self::I64(value) => value.try_into().ok(),
            _ => None,
        }
    }

    /// Returns a float of either width, or `None` if the value has another type.
    #[must_use]
    pub fn as_f64(&self) -> Option<f64> {
        match *self {
            Self::F32(value) => Some(value.into()),
            Self::F64(value) => Some(value),
            _ => None,
        }
    }

    /// Returns the truth value, or `None` if the value has another type.
    #[must_use]
    pub fn as_bool(&self) -> Option<bool> {
        match *self {
            Self::Bool(value) => Some(value),
            _ => None,
        }
    }

    /// Returns the elements of an array, or `None` if the value is not an array.
    #[must_use]
    pub fn as_array(&self) -> Option<&Array> {
        match self {
            Self::Array(array) => Some(array),
            _ => None,
        }
    }
}

/// Defines the conversions of a type, and of lists of it.
macro_rules! conversions {
    ($($variant:ident, $type:ty $(, $id:literal, $doc:literal)?;)*) => {
        $(
            impl From<$type> for Value {
                fn from(value: $type) -> Self {
                    Self::$variant(value)
                }
            }

            impl From<Vec<$type>> for Value {
                fn from(values: Vec<$type>) -> Self {
                    Self::Array(Array::$variant(values))
                }
            }
        )*
    };
}

with_number_types!(conversions);
conversions! {
    Bool, bool;
    String, String;
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::String(text.to_owned())
    }
}
