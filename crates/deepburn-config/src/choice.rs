//! Names in a configuration that stand for values of an enum.
//!
//! A value may have several names: `eval_loss` and `loss` are one metric. It is written to
//! `job.json` under the first one. Where the values of a choice are not an enum, because they carry
//! parameters of other keys, the key is a string with a fixed list of names instead.

/// A type whose values have names, which are compared without regard to case.
pub(crate) trait Choice: Copy + 'static {
    /// Every name, in the order in which messages list them.
    const NAMES: &'static [&'static str];
    /// The value of each name.
    const VALUES: &'static [Self];

    /// Returns the value called `name`.
    fn named(name: &str) -> Option<Self> {
        let place = Self::NAMES.iter().position(|known| known.eq_ignore_ascii_case(name))?;
        Some(Self::VALUES[place])
    }
}

/// Gives the variants of an enum their names, and serializes them by the first one:
/// `choices!(Shape { "log" => Log, "linear" => Linear });`.
macro_rules! choices {
    ($Choice:ident { $($name:literal => $Value:ident),+ $(,)? }) => {
        impl $crate::choice::Choice for $Choice {
            const NAMES: &'static [&'static str] = &[$($name),+];
            const VALUES: &'static [Self] = &[$(Self::$Value),+];
        }

        impl $Choice {
            /// Returns the name in configurations; the first one, if there are several.
            // The other names of a value are the patterns that are not reached.
            #[allow(unreachable_patterns)]
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$Value => $name,)+
                }
            }
        }

        impl serde::Serialize for $Choice {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.name())
            }
        }
    };
}

pub(crate) use choices;
