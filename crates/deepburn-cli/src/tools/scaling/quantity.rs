//! Parsers of rates and times on the command line: `100Gb`, `12.5GB`, `150T`, `5us`.
//!
//! Bits and bytes are easily confused in a bandwidth, because vendors give network links in bits
//! and memory in bytes. So a unit is required, `b` and `B` differ, and `100G` is an error.

/// The value of `--network`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum NetworkKind {
    /// Links between machines.
    Links {
        /// Bytes per second.
        bandwidth: f64,
    },
    /// Rank threads of this machine.
    Threads,
}

/// Parses `threads` or a bandwidth.
///
/// # Errors
/// Returns the message of [`bandwidth`], which clap prints after the name of the option.
pub(super) fn network(text: &str) -> Result<NetworkKind, String> {
    match text {
        "threads" => Ok(NetworkKind::Threads),
        _ => bandwidth(text).map(|bandwidth| NetworkKind::Links { bandwidth }),
    }
}

/// Parses a bandwidth in bits (`100Gb`, `100Gbit`, `100Gbps`) or bytes (`12.5GB`) per second, with
/// an optional `/s`. Returns bytes per second.
///
/// # Errors
/// Returns a message if the unit is missing or unknown, or if the number is not positive.
pub(super) fn bandwidth(text: &str) -> Result<f64, String> {
    let rule = || {
        format!(
            "invalid bandwidth {text:?}; write bits as 100Gb or bytes as 12.5GB, per second, with k, M, G or T"
        )
    };
    let unit = text.strip_suffix("/s").unwrap_or(text);
    let in_bits = ["bit", "bps", "b"].iter().find_map(|suffix| unit.strip_suffix(suffix));
    let (number, bytes) = match (in_bits, unit.strip_suffix('B')) {
        (Some(number), _) => (number, 1.0 / 8.0),
        (None, Some(number)) => (number, 1.0),
        (None, None) => return Err(rule()),
    };
    Ok(prefixed(number).ok_or_else(rule)? * bytes)
}

/// Parses a number of operations per second: `150T`, `80G`.
///
/// # Errors
/// Returns a message if the text has another form, or if the number is not positive.
pub(super) fn flops(text: &str) -> Result<f64, String> {
    prefixed(text).ok_or_else(|| {
        format!("invalid FLOP/s {text:?}; use a positive number with k, M, G, T or P, such as 150T")
    })
}

/// Parses a time: `5us`, `200ns`, `1ms`, `0.1s`. Returns seconds.
///
/// # Errors
/// Returns a message if the unit is missing or unknown, or if the time is negative.
pub(super) fn seconds(text: &str) -> Result<f64, String> {
    let units_per_second = [("ns", 1e9), ("us", 1e6), ("µs", 1e6), ("ms", 1e3), ("s", 1.0)];
    let read = units_per_second.iter().find_map(|(unit, count)| {
        let number: f64 = text.strip_suffix(unit)?.trim_end().parse().ok()?;
        Some(number / count)
    });
    read.filter(|seconds| seconds.is_finite() && *seconds >= 0.0)
        .ok_or_else(|| format!("invalid time {text:?}; use ns, us, ms or s, such as 5us"))
}

/// Parses a positive number with a decimal prefix.
fn prefixed(text: &str) -> Option<f64> {
    let prefixes = [('k', 1e3), ('M', 1e6), ('G', 1e9), ('T', 1e12), ('P', 1e15)];
    let (number, factor) = prefixes
        .iter()
        .find_map(|(prefix, factor)| Some((text.strip_suffix(*prefix)?, *factor)))
        .unwrap_or((text, 1.0));
    let number: f64 = number.trim_end().parse().ok()?;
    let value = number * factor;
    (value.is_finite() && value > 0.0).then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_bandwidth_in_bits_and_bytes() {
        for text in
            ["100Gb", "100Gbit", "100Gbps", "100Gb/s", "100 Gb", "0.1Tb", "12.5GB", "12.5GB/s"]
        {
            assert_eq!(bandwidth(text), Ok(12.5e9), "{text}");
        }
        assert_eq!(bandwidth("8b"), Ok(1.0));
        for text in ["100G", "100", "-1Gb", "0GB", "Gb", "", "infGB", "100gB", "nanb"] {
            let message = bandwidth(text).unwrap_err();
            assert!(message.contains("bits as 100Gb or bytes as 12.5GB"), "{message}");
        }
    }

    #[test]
    fn parses_times_and_rates_with_units() {
        assert_eq!(seconds("5us"), Ok(5e-6));
        assert_eq!(seconds("2 ms"), Ok(2e-3));
        assert_eq!(seconds("0s"), Ok(0.0));
        for text in ["5", "-1us", "us", "NaNs", "5 minutes"] {
            assert!(seconds(text).unwrap_err().contains("such as 5us"), "{text}");
        }
        assert_eq!(flops("150T"), Ok(150e12));
        assert_eq!(flops("2e9"), Ok(2e9));
        for text in ["fast", "-1T", "0", "1TT"] {
            assert!(flops(text).unwrap_err().contains("such as 150T"), "{text}");
        }
    }

    #[test]
    fn parses_threads_as_a_network() {
        assert_eq!(network("threads"), Ok(NetworkKind::Threads));
        assert_eq!(network("8Gb"), Ok(NetworkKind::Links { bandwidth: 1e9 }));
        assert!(network("thread").is_err());
    }
}
