//! `model.quantization_config`: the frozen base model in 8 or 4 bits.

use crate::check::check;
use crate::diagnosis::{ConfigError, Findings, refuse, warning};
use crate::job_plan::{Backend, Job, QuantizationJob};
use crate::job_rules::JobReader;
use crate::keys::job::QuantizationConfig;
use crate::plan::QuantizedFormat;
use crate::section::{ConfigEntry, FromEntry, Section, Setting};
use crate::source::{SourceName, parse_json};

/// Reads the section; `None` if it selects no format.
pub(super) fn read(
    section: &QuantizationConfig<'_>,
    findings: &mut Findings,
) -> Option<QuantizationJob> {
    let format = format(section, findings)?;
    let names = section.llm_int8_skip_modules.value.iter();
    Some(QuantizationJob { format, skip_modules: names.map(|name| (*name).to_owned()).collect() })
}

impl QuantizationJob {
    /// Parses the fields of `model.quantization_config` as a JSON object; `None` if they select no
    /// format.
    ///
    /// # Errors
    /// Returns a [`ConfigError`] with all invalid fields.
    pub fn parse(fields: &str) -> Result<Option<Self>, ConfigError> {
        let name = "quantization_config";
        let root = parse_json(fields, SourceName { document: name, name: "inline" })?;
        let mut findings = Findings::default();
        check(QuantizationConfig::KEYS, &root, &mut findings);
        let job = read(&QuantizationConfig::read(&ConfigEntry::document(&root)), &mut findings);
        findings.verdict(name)?;
        Ok(job)
    }
}

/// Returns the format that the flags select; `None` if they select none.
fn format(config: &QuantizationConfig<'_>, findings: &mut Findings) -> Option<QuantizedFormat> {
    let (four, eight) = (&config.load_in_4bit, &config.load_in_8bit);
    refuse!(if four.value && eight.value; findings, &*eight.path =>
        "is true together with load_in_4bit, and a matrix has one format"; "remove one of them");
    let kind = &config.bnb_4bit_quant_type;
    refuse!(if kind.value == "fp4"; findings, &*kind.path =>
        "\"fp4\" is not supported"; "write \"nf4\"");
    let unused =
        if eight.value { "load_in_8bit has one 8-bit format" } else { "load_in_4bit is not true" };
    for key in [&**kind, &*config.bnb_4bit_use_double_quant, &*config.bnb_4bit_compute_dtype] {
        warning!(if key.is_given() && !four.value; findings, &*key.path =>
            "has no effect: {unused}"; "remove it");
    }
    let skip = &config.llm_int8_skip_modules;
    warning!(if skip.is_given() && !four.value && !eight.value; findings, &*skip.path =>
        "has no effect: nothing is quantized"; "set load_in_4bit or load_in_8bit to true, or remove it");
    match (four.value, eight.value) {
        (true, _) if config.bnb_4bit_use_double_quant.value => Some(QuantizedFormat::Nf4Double),
        (true, _) => Some(QuantizedFormat::Nf4),
        (false, true) => Some(QuantizedFormat::Int8),
        (false, false) => None,
    }
}

impl JobReader<'_> {
    /// Checks that the job trains an adapter on a backend that can read quantized matrices, in the
    /// type that the section names.
    pub(crate) fn check_quantization(
        &mut self,
        section: &Setting<'_, QuantizationConfig<'_>>,
        job: &Job,
    ) {
        if job.model.quantization.is_none() {
            return;
        }
        let config = &section.value;
        // The finding names the flag that asked for the format.
        let flag =
            if config.load_in_4bit.value { &config.load_in_4bit } else { &config.load_in_8bit };
        refuse!(if self.lacks_adapter(&job.model); self.findings, &*flag.path =>
            "quantizes a frozen base model, and all weights are trained: neither model.lora nor model.adapter is given";
            "give model.lora, or remove it");
        let backend = job.training.placement.backend;
        refuse!(if backend != Backend::Flex; self.findings, &*section.path =>
            "is not supported by training.backend \"{}\"", backend.name();
            "use \"flex\", or remove it");
        let (fp16, bf16) = (&self.deepspeed.fp16.value, &self.deepspeed.bf16.value);
        let trained = match (fp16.enabled.value, bf16.enabled.value) {
            (true, _) => "float16",
            (false, true) => "bfloat16",
            (false, false) => "float32",
        };
        let key = &config.bnb_4bit_compute_dtype;
        refuse!(if key.value.is_some_and(|given| given != trained); self.findings, &*key.path =>
            "\"{}\": products are computed in the type of training, which is {trained} here", key.value.unwrap_or("");
            "write \"{trained}\", remove it, or change deepspeed.bf16 and deepspeed.fp16");
    }
}
