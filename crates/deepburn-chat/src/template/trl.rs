//! The chat templates that TRL knows.

use std::ops::Range;

/// How the marks of TRL's version of a template differ from the turns that are found in the
/// template's own text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TrlMarks {
    /// Texts before a turn that TRL marks too, such as the header of the assistant.
    before: &'static [&'static str],
    /// Texts after a turn that TRL marks too.
    after: &'static [&'static str],
    /// Texts at the start and at the end of a turn that TRL does not mark.
    outside: [Option<&'static str>; 2],
    /// The end of a turn that has marks of its own.
    divided: Option<&'static str>,
    /// The end of a turn that is not the last one, if the template ends the last one differently.
    pub(crate) end: Option<&'static str>,
}

impl TrlMarks {
    const TURNS: Self =
        Self { before: &[], after: &[], outside: [None, None], divided: None, end: None };
    const DEEPSEEK: Self =
        Self { before: &["<｜Assistant｜>", "<｜tool▁outputs▁end｜>"], ..Self::TURNS };
    const DIFFUSION_GEMMA: Self = Self {
        outside: [Some("<|turn>model\n"), Some("<|tool_response>")],
        divided: Some("<turn|>\n"),
        ..Self::TURNS
    };
    const GLM: Self = Self {
        before: &["\n<think></think>"],
        after: &["<|user|>", "<|observation|>", "<|system|>"],
        ..Self::TURNS
    };
    const GPT_OSS: Self = Self { end: Some("<|end|>"), ..Self::MUSE };
    const LINE_BREAK: Self = Self { before: &["\n"], ..Self::TURNS };
    const LLAVA: Self = Self { outside: [None, Some(" ")], ..Self::TURNS };
    const MUSE: Self = Self { before: &["<|start|>assistant"], ..Self::TURNS };
    const NEMOTRON: Self = Self { before: &["<think>\n", "<think></think>"], ..Self::TURNS };
    // The variable `enable_thinking` chooses the reasoning in the generation prompt.
    const QWEN: Self = Self { before: &["<think>\n\n</think>\n\n", "<think>\n"], ..Self::TURNS };

    /// Returns the spans of `text` that TRL's version of the template marks.
    pub(crate) fn spans(self, text: &str, turns: &[Range<usize>]) -> Vec<Range<usize>> {
        let mut spans = Vec::new();
        for turn in turns {
            let (before, after) = (&text[..turn.start], &text[turn.end..]);
            let length = |found: Option<&&str>| found.map_or(0, |it| it.len());
            let [start, end] = self.outside;
            let start = length(start.as_ref().filter(|it| text[turn.clone()].starts_with(**it)));
            let inner = turn.start + start..turn.end;
            let end = length(end.as_ref().filter(|it| text[inner.clone()].ends_with(**it)));
            let more = length(self.before.iter().find(|it| before.ends_with(**it)));
            let rest = length(self.after.iter().find(|it| after.starts_with(**it)));
            let span = inner.start - more..inner.end - end + rest;
            let divided = self.divided.filter(|it| text[span.clone()].ends_with(it));
            let border = span.end - divided.map_or(0, str::len);
            spans.push(span.start..border);
            spans.extend(divided.map(|_| border..span.end));
        }
        spans
    }
}

//= trl 1.16.0 chat_template_utils.py get_training_chat_template
/// The hashes of the templates for which TRL 1.16 has a version with `{% generation %}` marks
/// (`get_training_chat_template`), where it has the marks, and its names of the templates.
const MARKED_VERSIONS: [(u64, TrlMarks); 31] = [
    (0x1691_3247_e5fd_dff9, TrlMarks::TURNS),           // cohere
    (0xf555_a55b_eeb2_8eee, TrlMarks::TURNS),           // cohere2
    (0x845f_df81_3c63_7ee2, TrlMarks::DEEPSEEK),        // deepseek_r1_distill
    (0x4526_f885_d718_fa95, TrlMarks::DEEPSEEK),        // deepseekv3
    (0x99f1_7d41_517c_751b, TrlMarks::DIFFUSION_GEMMA), // diffusion_gemma
    (0x5c10_ee65_212d_93b3, TrlMarks::TURNS),           // gemma
    (0xc90d_ea00_b85c_935d, TrlMarks::TURNS),           // gemma3
    (0x5f4d_d018_f452_1bc9, TrlMarks::GLM),             // glm4moe
    (0x5da6_6262_d54a_9064, TrlMarks::GPT_OSS),         // gptoss
    (0x2750_4678_98fc_405a, TrlMarks::TURNS),           // idefics3
    (0x7fae_f5d8_e49c_f520, TrlMarks::TURNS),           // lfm2
    (0x8f22_102d_7794_bb85, TrlMarks::TURNS),           // lfm2_v2
    (0x0e60_067a_5537_498e, TrlMarks::TURNS),           // llama3
    (0xce77_4978_6d3f_fecd, TrlMarks::LLAVA),           // llava_next
    (0x67bb_cd17_0ca4_388e, TrlMarks::MUSE),            // muse_glimmer
    (0x43b4_45dc_85f1_b759, TrlMarks::NEMOTRON),        // nemotron_3_nano
    (0x4fd9_cf68_c291_e866, TrlMarks::NEMOTRON),        // nemotron_3_super
    (0x30fa_1947_e9ca_3dab, TrlMarks::NEMOTRON),        // nemotron_3_ultra
    (0xe024_b304_c346_f44d, TrlMarks::NEMOTRON),        // nemotron_3_5_lightning
    (0xeceb_db26_677c_663d, TrlMarks::TURNS),           // phi3
    (0xcf27_8cde_387a_54c8, TrlMarks::TURNS),           // phi3_5
    (0xc2b2_7ee6_0f1b_8775, TrlMarks::LINE_BREAK),      // qwen2_5
    (0x7124_2f76_359e_71e8, TrlMarks::TURNS),           // qwen2_5_vl
    (0x959a_4551_391a_6549, TrlMarks::QWEN),            // qwen3
    (0x3751_fe8e_a484_48ab, TrlMarks::TURNS),           // qwen3_instruct_2507
    (0xf67a_fe26_6c47_0df1, TrlMarks::TURNS),           // qwen3_vl
    (0x407b_bcde_b627_37b7, TrlMarks::QWEN),            // qwen3_5_nothink
    (0xf07c_510f_47fb_aca0, TrlMarks::QWEN),            // qwen3_5_think
    (0x8ae3_a8bc_6e68_f114, TrlMarks::QWEN),            // qwen3_6
    (0x8b6b_0871_c5db_260b, TrlMarks::QWEN),            // qwen3_8
    (0x92cf_2b51_e627_e013, TrlMarks::TURNS),           // smolvlm
];

/// Returns the marks of TRL's version of a template; `None` if it has no version with
/// `{% generation %}` marks.
pub(super) fn trl_marks(source: &str) -> Option<TrlMarks> {
    let hash = fnv1a(source.as_bytes());
    MARKED_VERSIONS.iter().find(|(known, _)| *known == hash).map(|(_, marks)| *marks)
}

/// Returns the FNV-1a hash of 64 bits.
fn fnv1a(bytes: &[u8]) -> u64 {
    const OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x0100_0000_01b3;
    bytes.iter().fold(OFFSET, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(PRIME))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_fnv1a() {
        assert_eq!(fnv1a(b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv1a(b"foobar"), 0x8594_4171_f739_67e8);
    }

    /// Spans of TRL 1.16 in texts of its templates `deepseekv3`, `gptoss`, `glm4moe`,
    /// `diffusion_gemma`, `llava_next`, `nemotron_3_nano`, `qwen3`, `qwen3_5_think` and `qwen2_5`.
    /// Turns are in `« »`, and spans in `⟨ ⟩`.
    #[test]
    fn turns_become_the_spans_of_trl() {
        for (marks, text) in [
            (TrlMarks::DEEPSEEK, "<｜User｜>a⟨<｜Assistant｜>«b<｜end▁of▁sentence｜>»⟩"),
            (TrlMarks::DEEPSEEK, "c⟨<｜tool▁outputs▁end｜>«b<｜end▁of▁sentence｜>»⟩"),
            (
                TrlMarks::GPT_OSS,
                "a<|end|>⟨<|start|>assistant«<|channel|>final<|message|>b<|return|>»⟩",
            ),
            (TrlMarks::GLM, "<|assistant|>⟨«\n<think></think>\nb»<|user|>⟩\nc"),
            (TrlMarks::DIFFUSION_GEMMA, "<|turn>model\n⟨«a<tool_call|>⟩<|tool_response>»b"),
            (TrlMarks::DIFFUSION_GEMMA, "b«<|turn>model\n⟨a<turn|>\n»⟩<|turn>user"),
            (TrlMarks::LLAVA, "[INST] a [/INST]⟨« b</s>⟩ »[INST]"),
            (TrlMarks::GLM, "<|assistant|>⟨\n<think></think>«\nb»<|user|>⟩\nc"),
            (TrlMarks::NEMOTRON, "assistant\n⟨<think></think>«a<|im_end|>\n»⟩"),
            (TrlMarks::QWEN, "assistant\n⟨<think>\n\n</think>\n\n«a<|im_end|>\n»⟩"),
            (TrlMarks::QWEN, "assistant\n⟨<think>\n«b\n</think>\n\na<|im_end|>\n»⟩"),
            (TrlMarks::LINE_BREAK, "<|im_start|>assistant⟨\n«a<|im_end|>\n»⟩<|im_start|>"),
            (TrlMarks::TURNS, "<start_of_turn>model\n⟨«a<end_of_turn>\n»⟩"),
        ] {
            let (mut plain, mut at) = (String::new(), [0; 4]);
            for char in text.chars() {
                match ['⟨', '«', '»', '⟩'].iter().position(|it| *it == char) {
                    Some(mark) => at[mark] = plain.len(),
                    None => plain.push(char),
                }
            }
            let [start, turn_start, turn_end, end] = at;
            let turn = turn_start..turn_end;
            let mut spans = marks.spans(&plain, std::slice::from_ref(&turn));
            // An end with its own marks follows the rest.
            spans.dedup_by(|next, span| {
                (span.end == next.start).then(|| span.end = next.end).is_some()
            });
            assert_eq!((spans.len(), &spans[0]), (1, &(start..end)), "{text}");
        }
    }
}
