"""docs/checkpoint-format.md, sentence by sentence: each is held by the tests named here, two of them in this file."""

import ast
import hashlib
import json
import re
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tk.checkpoint import Checkpoint
from tk.core.layout import Layout
from tk.tests.checkpoint.faults import watched
from tk.tests.checkpoint.saving import STATES, mixed_table, save_step, true_values

ROOT = Path(__file__).parents[2]
TABLE = mixed_table()

BY_HAND = "format_page:a_step_can_be_read_by_hand"
IN_ORDER = "format_page:a_step_is_saved_in_this_order"
MATRIX = "matrix:every_rank_of_every_layout_reads_its_own_from_every_other"
CORPUS = "corpus:every_broken_checkpoint_gets_its_error_and_writes_nothing"
HOSTILE = "target:refused_before_anything_is_touched"
BLOCKS = "reader:a_large_tensor_is_checked_by_blocks"
OTHERS = "other_writers:another_writer_between_our_commands"
TRANSFORMERS = "hugging_face:a_model_through_tp_2_and_back_to_transformers"

# How each statement of the page begins, in its order -> tests, as room/file:name without `test_`.
HELD = {
    "This page specifies": ["format_page:every_sentence_is_held_by_tests_that_exist"],
    "`checkpoint/` is the implementation": ["format_page:every_sentence_is_held_by_tests_that_exist"],
    "`COMMIT`: the SHA-256": [BY_HAND],
    "`manifest.json`: everything": [BY_HAND],
    "`parts/WRITER.json`: one": [BY_HAND],
    "`model-*.safetensors`: slot": [BY_HAND],
    "`optim-SLOT-*.safetensors`: one": [BY_HAND],
    "`config.json`, `tokenizer.json`": ["run_folder:a_saved_step_is_there"],
    "`model.safetensors.index.json`: only": [
        "hugging_face:no_index_is_written_where_tensors_are_cut",
        "hugging_face:a_saved_step_at_tp_1_is_a_folder_that_transformers_loads",
    ],
    "A folder counts as a checkpoint only if": [CORPUS, "step_folder:a_missing_file"],
    "Every file must have the size": [CORPUS, "step_folder:a_missing_file"],
    "Its side files are those of the manifest": [
        OTHERS,
        CORPUS,
        "side_files:documents_of_a_sealed_folder_may_be_edited_and_removed",
    ],
    "Weights of another program": [OTHERS, "strangers:two_models_in_one_folder_are_named_with_the_way_out"],
    "Other strange files": [OTHERS],
    "A folder with any of the first three names": ["hugging_face:a_tk_file_is_never_read_as_a_hugging_face_one"],
    "A folder whose name is that of another step": ["step_names:a_copied_step_is_refused_and_nothing_moves"],
    "Tensors have the names": [TRANSFORMERS],
    "A layout decides which boxes": [MATRIX, "matrix:reshard"],
    "A tied tensor is not stored": ["matrix:a_tied_name_reads_its_original"],
    "If config.json ties": [
        "model/stored_config:a_head_that_differs_is_used_kept_and_trained",
        "model/stored_config:a_head_that_is_equal_stays_tied",
    ],
    "A tensor without elements": [
        "hugging_face_values:every_dtype_and_empty_tensors_come_through",
        "hugging_face_values:an_empty_name_and_an_empty_file_are_refused",
    ],
    "`master` is the fp32 value": ["plan:a_change_of_dtype_casts_from_the_master_or_the_weight"],
    "A weight that is read": [
        "plan:a_read_in_fp32_takes_the_master",
        "diff:other_dtypes_are_compared_in_fp32",
        "hugging_face_values:a_read_in_another_dtype_is_cast_from_the_master",
    ],
    "Casts round to nearest even": ["hugging_face:export_casts_as_torch_does_and_changes_the_config"],
    "Integers keep their dtype": [
        "hugging_face_values:a_change_of_dtype_leaves_integers_alone",
        "hugging_face_values:quantized_values_are_not_cast_without_their_scales",
    ],
    "The file is read as `transformers`": ["model/config_changes:a_choice_of_keys_by_themselves"],
    "Each architecture lists every key": [
        "model/config_keys:every_key_of_the_class_of_transformers_is_in_one_list",
        "model/config_keys:a_file_that_transformers_saves_has_no_unknown_key",
    ],
    "A key that makes the model": ["model/config_keys:a_missing_key_has_the_default_of_the_class_of_transformers"],
    "The ids of special tokens": ["model/config_keys:a_missing_key_has_the_default_of_the_class_of_transformers"],
    "`null` is refused": ["model/config_keys:null_is_read_only_where_it_has_a_meaning"],
    "`rope_scaling` counts before": [
        "model/rope_keys:theta_is_that_of_the_object_that_counts",
        "model/rope_keys:a_theta_that_an_edit_loses_is_said",
    ],
    "A top-level `original_max": ["model/rope_keys:scaling_is_that_of_the_object_that_counts"],
    "Parameters per layer type": ["model/rope_keys:an_embedding_that_tk_lacks_is_refused_by_key"],
    "With YaRN the longest text": ["model/shape:yarn_extends_the_context_and_linear_scaling_does_not"],
    "`layer_types` gives": ["model/window_keys:layers_have_the_window_of_their_type"],
    "Two spellings of one key": ["model/config_keys:spellings_of_one_key_must_agree"],
    "A key of a feature that tk lacks": ["model/config:a_config_that_tk_cannot_run_is_refused"],
    "`quantization_config` is refused": ["model/config_keys:quantized_weights_are_refused_before_anything_else"],
    "Keys that change nothing": ["model/config_keys:a_key_of_no_list_is_named_unless_it_says_nothing"],
    "Each is valid on its own": ["hugging_face:the_safetensors_library_reads_every_file"],
    "Its header is padded": [BY_HAND, "hugging_face:the_safetensors_library_reads_every_file"],
    "An entry that is a whole tensor": [BY_HAND],
    '`{"writer", "files"': [BY_HAND],
    'A chunk is `{"tensor"': [BY_HAND, "chunk:hostile_parts"],
    "`box`:": [BY_HAND],
    "`offset`:": [BY_HAND],
    "`crc`:": [BY_HAND, BLOCKS],
    "The manifest is a JSON object": [BY_HAND],
    '`format` ("tk")': [BY_HAND, "manifest:hostile_manifests"],
    "`layout`: the layout": [BY_HAND, "manifest:hostile_manifests"],
    "`tensors`: `{": [BY_HAND, "manifest:hostile_manifests"],
    "`split` is null": [BY_HAND, "manifest:hostile_manifests"],
    "Each tensor has its own slots": [BY_HAND, "manifest:hostile_manifests"],
    "`aliases`, and": [BY_HAND, "manifest:hostile_manifests"],
    "`resume`: the": [BY_HAND, "manifest:hostile_manifests"],
    "`files`: the side": [BY_HAND, "manifest:hostile_manifests"],
    "`parts`: the same": [BY_HAND, "manifest:hostile_manifests"],
    "`layout` has the keys": ["core/layout:new_axes_stand_in_a_manifest_only_where_they_say_something"],
    "It has three more only": ["core/layout:new_axes_stand_in_a_manifest_only_where_they_say_something"],
    "A manifest with one of these three": [
        "manifest:a_manifest_comes_back_from_its_bytes",
        "step_names:a_step_of_a_newer_tk_is_refused_and_not_passed_over",
    ],
    "A step of a run that trains an adapter": ["train/adapter_base:a_step_holds_the_adapter_and_its_slots_alone"],
    "Their names are those of PEFT": ["train/adapter_base:a_step_holds_the_adapter_and_its_slots_alone"],
    "Its manifest has two more keys": [
        "adapter_record:a_manifest_with_an_adapter_comes_back_and_older_readers_refuse_it_as_newer",
        "train/adapter_base:a_step_holds_the_adapter_and_its_slots_alone",
    ],
    "The identity is the SHA-256": [
        "identity:every_layout_of_the_weights_has_the_identity_that_the_format_page_defines"
    ],
    "So a base that was resharded": ["train/adapter_base:a_resharded_base_is_the_same_base"],
    "It is computed once": [
        "identity:an_identity_is_computed_once",
        "identity:one_changed_value_is_another_identity_although_the_first_is_kept",
    ],
    "A reshard or export that keeps": ["identity:an_identity_is_computed_once"],
    "An adapter is loaded on the base": ["train/adapter_base:another_base_is_refused_with_both_names"],
    "A run folder holds": ["run_folder:a_second_writer_is_refused_by_name", "run_folder:a_saved_step_is_there"],
    "Its content names the holder": ["run_lock:a_living_job_of_another_host_keeps_others_out"],
    "If it names a job": [
        "run_lock:a_living_job_of_another_host_keeps_others_out",
        "run_lock:a_dead_job_of_another_host_is_followed_once_it_was_silent",
    ],
    "Two readings of that time": ["run_lock:a_dead_job_of_another_host_is_followed_once_it_was_silent"],
    "Before a job publishes": ["run_lock:a_job_that_lost_its_lock_publishes_and_removes_nothing"],
    "Before a save is written, ranks": [
        "train/replica_check:drift_ends_the_job_and_names_tensor_and_ranks",
        "train/replica_check:drift_that_is_found_late_leaves_nothing",
    ],
    "Each rank then writes its files": [IN_ORDER],
    "Rank 0 waits": [IN_ORDER, "commit:missing_parts_are_named_and_nothing_is_committed"],
    "Then it fsyncs the parent": [IN_ORDER],
    "A good step is never overwritten": ["locked_run:a_good_step_is_never_overwritten_and_a_bad_one_is_quarantined"],
    "A step is pruned by renaming": [
        "crash:a_missing_fsync_is_seen",
        "locked_run:pruning_keeps_the_newest_the_milestones_and_bad_steps",
    ],
    "A file system that cannot rename": ["pruning:steps_of_a_lower_layer_are_pruned_in_place"],
    "A step that cannot be pruned": ["save_job:a_step_is_saved_even_if_older_ones_cannot_be_removed"],
    "A save that fails removes": ["save_job:a_failed_save_leaves_a_full_disk_no_fuller"],
    "A process that makes a folder": ["crash:power_cut_after_every_operation"],
    "With `[checkpoint] async_save`": [
        "train/saver:in_the_background_as_in_place",
        "train/saver:a_copied_save_is_written_only_once_replicas_agree",
    ],
    "That begins once the replicas": ["train/saver:a_copied_save_is_written_only_once_replicas_agree"],
    "One save is in flight": [
        "background_save:only_one_save_is_in_flight",
        "train/saver:a_failed_save_is_raised_at_the_next_save_and_at_the_end",
    ],
    "The last save of a run": ["train/run:ctrl_c_saves_and_the_resumed_run_is_bit_equal"],
    "The process is started by exec": [
        "background_save:it_loads_no_torch_and_holds_the_lock_with_its_rank",
        "background_save:terminal_signals_do_not_disturb_it",
    ],
    "The lock's holder removes": [
        "run_folder:the_lock_and_leftovers_of_a_killed_job_are_cleared",
        "train/saver:starting_again",
    ],
    "An ATTEMPT is exactly": ["run_folder:the_lock_and_leftovers_of_a_killed_job_are_cleared"],
    "Only content that was read": ["storage_errors:no_errno_at_any_call_counts_as_damage"],
    "Steps that are newer": [
        "train/saver:starting_again",
        "train/resume:damage_that_one_rank_finds_on_reading_takes_all_to_the_step_before",
    ],
    "Damage that shows only on loading": [
        "train/resume:damage_that_one_rank_finds_on_reading_takes_all_to_the_step_before"
    ],
    "In four cases the start fails": [
        "storage_errors:a_step_that_this_user_may_not_read_stops_the_start",
        "train/resume:a_copied_step_stops_the_start",
    ],
    "The system refuses": [
        "storage_errors:a_step_that_this_user_may_not_read_stops_the_start",
        "step_names:a_step_of_a_newer_tk_is_refused_and_not_passed_over",
        "train/resume:a_copied_step_stops_the_start",
        "train/resume:where_no_step_is_good_nothing_moves_and_training_does_not_begin_anew",
    ],
    "A file counts as missing": ["storage:a_file_is_missing_only_where_the_folder_does_not_list_it"],
    "Resuming a given checkpoint": [
        "train/run:fork_moves_newer_steps_and_sigterm_saves_and_exits_0",
        "train/saver:starting_again",
    ],
    "Lines of `metrics.jsonl`": ["train/run:ctrl_c_saves_and_the_resumed_run_is_bit_equal"],
    "`tk reshard` and `tk export` take": [
        "side_files:what_a_model_needs_is_copied_and_the_rest_named",
        "side_files:remote_code_and_chat_templates_load_from_an_export",
    ],
    "They never copy": ["side_files:what_a_model_needs_is_copied_and_the_rest_named"],
    "A side file without a digest": ["side_files:a_link_to_a_file_of_another_name_is_not_carried_away"],
    "With `--dtype` every": ["side_files:every_dtype_in_a_config_changes_with_the_weights"],
    "A Hugging Face folder has no checksums": [
        "disturbances:a_source_that_changes_while_it_is_read_is_whole_or_refused",
        "disturbances:the_refusal_names_the_file",
    ],
    "If one has another inode": [
        "disturbances:a_source_that_changes_while_it_is_read_is_whole_or_refused",
        "disturbances:the_refusal_names_the_file",
    ],
    "Files that `--link` shares": ["disturbances:a_link_is_never_made_under_checksums_of_other_bytes"],
    "`tk reshard` and `tk export` write": ["crash:killed_at_every_operation"],
    "A target that has the name": ["step_names:no_copy_gets_a_name_that_a_run_would_take_for_something_else"],
    "The next command at the same": [
        "crash:killed_at_every_operation",
        "whole_folder:two_jobs_at_once_to_one_target",
    ],
    "If the target is a step of a run": ["run_lock:a_copy_takes_the_lock_of_the_run_that_gets_it"],
    "`--force` replaces a folder only": [HOSTILE],
    "Manifest and parts account": [HOSTILE],
    "So does a side file": ["replaceable:a_plain_export_with_a_model_card_is_repeated"],
    "An export with a model card": [
        "replaceable:a_plain_export_with_a_model_card_is_repeated",
        "replaceable:a_card_that_is_edited_during_the_copy_stays",
    ],
    "Any other file is named": [HOSTILE],
    "A target is refused": [HOSTILE, "target:mount_points_are_refused"],
    "Folders are compared by device": [HOSTILE, "target:mount_points_are_refused"],
    "A target that holds a file": ["target:a_folder_that_holds_the_files_behind_the_source_s_links_is_refused"],
    "The same check is repeated": [
        "whole_folder:files_that_arrive_during_the_copy_stay",
        "whole_folder:files_that_arrive_in_the_old_folder_while_it_is_removed_stay",
    ],
    "A run folder stands for": ["run_folder:the_newest_good_step_is_taken_and_the_others_explained"],
    "A step folder that is given": ["scale:one_tensor_opens_its_own_parts_only"],
    "The parts that hold a tensor": ["scale:one_tensor_opens_its_own_parts_only"],
    "The header of a file is compared": [CORPUS],
    "Every block of 16 MiB": [BLOCKS],
    "Any file may be a symbolic link": [
        OTHERS,
        "hugging_face:links_are_followed_and_those_to_nowhere_named",
        "hugging_face_folder:an_export_is_read_from_the_hubs_cache",
        "step_folder:a_link_in_place_of_a_shard",
    ],
    "A link to nowhere": [OTHERS, "step_folder:a_link_in_place_of_a_shard"],
    "A Hugging Face folder is read": ["hugging_face:a_folder_of_one_file_or_many_is_read_as_it_lies"],
    "`model.safetensors` counts": ["hugging_face_weights:a_single_file_counts_before_an_index"],
    "An index may name files": ["hugging_face_weights:an_index_may_name_files_in_folders_below"],
    "If only the head": ["hugging_face_weights:a_tied_model_that_stores_only_its_head"],
    "Tensors have their names": [
        "hugging_face:names_without_the_base_models_prefix",
        "hugging_face_folder:names_of_other_architectures_come_back_as_they_were",
        "hugging_face_folder:the_base_models_prefix_stands_before_names_of_our_architectures_only",
    ],
    "A folder from which": [
        "foreign:weights_that_transformers_would_not_load_are_refused",
        "foreign:every_foreign_format_is_named_with_a_remedy",
    ],
    "A PEFT folder (": [
        "peft_folder:tensors_have_their_names_in_the_model",
        "peft_folder:a_wrapped_bias_and_whole_modules_have_the_names_of_the_base",
        "model/adapter_export:an_adapter_of_peft_gives_the_same_logits_here",
    ],
    "Any other name is refused": ["peft_folder:other_names_are_refused_by_name"],
    "An option that makes another product": [
        "model/peft_config:a_key_that_changes_the_adapter_is_refused_by_name",
        "model/peft_config:a_key_that_says_nothing_is_ignored",
    ],
    "Such a folder names its base": ["cli/export:an_adapter_goes_to_peft_and_into_its_base"],
    "Entries of its lists": ["model/stored_adapter:entries_that_select_nothing_are_no_error"],
    "Before an adapter is used": [
        "model/stored_adapter:a_tensor_that_does_not_fit_is_refused_by_name",
        "model/stored_adapter:values_are_finite",
    ],
    "Its tokenizer and chat templates": [
        "model/adapter_text:the_same_vocabulary_is_allowed_and_another_refused",
        "model/adapter_text:its_files_take_the_place_of_the_bases",
    ],
    "`tk export` writes an adapter's step": [
        "model/adapter_export:an_export_gives_the_same_logits_in_peft",
        "model/adapter_export:ends_of_names_are_targets_only_if_they_select_the_same_modules",
    ],
    "The names of the files stay": ["model/adapter_export:adapters_of_experts_are_exported_with_a_warning"],
    "With `--merge` the base": [
        "model/merged_adapter:a_merge_equals_that_of_peft",
        "model/merged_adapter:tiles_of_any_size_give_the_same_sums",
        "model/merged_adapter:adapters_of_experts_are_added_to_each_expert",
    ],
    "What the adapter holds whole": ["model/merged_adapter:a_merge_equals_that_of_peft"],
    "The share of the adapted": ["model/merged_adapter:a_sum_is_rounded_once_and_what_was_lost_is_counted"],
    "Ranks of one host that load together": [
        "shared_read:inference_ranks_read_the_weights_once",
        "shared_read:training_ranks_read_every_slot_once",
        "shared_read:rounds_hold_each_block_once_and_fit_the_areas",
        "shared_read:shared_memory_is_bounded_and_has_no_name",
        "train/shared_load:ranks_of_a_host_read_a_checkpoint_once",
    ],
    "They do so in rounds": ["shared_read:rounds_hold_each_block_once_and_fit_the_areas"],
    "Damage that one rank finds": [
        "shared_read:all_ranks_report_the_error_of_one",
        "shared_read:a_disk_error_on_one_rank_ends_all",
    ],
    "If the ranks would read": [
        "shared_read:training_ranks_read_every_slot_once",
        "shared_read:where_memory_cannot_be_shared_each_reads_alone",
    ],
    "A reader refuses:": ["json_strict:hostile_json", "safetensors_file:hostile_headers", "chunk:hostile_parts"],
    "JSON with duplicate keys": ["json_strict:hostile_json"],
    "JSON with, beyond": ["json_strict:hostile_json"],
    "unknown keys": ["manifest:hostile_manifests", "chunk:hostile_parts"],
    "file names other than": ["manifest:hostile_manifests", "chunk:hostile_parts"],
    "anything but regular": [CORPUS],
    "shapes of more than 8": ["safetensors_file:hostile_headers", "chunk:hostile_parts"],
    "boxes outside their": ["chunk:hostile_parts", CORPUS],
    "Nothing is allocated": ["corpus:no_broken_checkpoint_costs_more_memory_than_its_bytes"],
    "Files that readers": ["writer:more_chunks_than_a_reader_accepts_are_refused_before_anything_is_written"],
    "`verify` names files": ["verify:verify_sees_files_that_are_none_of_the_checkpoints"],
    "`verify` compares": [
        "verify:verify_compares_headers_and_index_with_the_manifest",
        "verify:headers_of_every_layout_are_those_of_the_manifest",
    ],
    "CRCs find accidents": ["corpus:every_flip_and_cut_is_found_by_loading_and_by_verify"],
    "Against an attacker": ["run_folder:a_saved_step_is_there"],
}


def statements(page: str) -> list[str]:
    """The page's sentences, list items and table rows; headings and lines that only open a table are left out."""
    found: list[str] = []
    for block in re.split(r"\n\s*\n|\n(?=- |\||#)|(?<=\|)\n", page):
        text = " ".join(block.removeprefix("- ").split())
        if text.startswith(("#", "|---", "| Name")) or not text:
            if text.startswith("#") and "\n" in block.strip():
                found += statements(block.strip().split("\n", 1)[1])
            continue
        if text.startswith("|"):
            found.append(": ".join(cell.strip() for cell in text.strip("|").split("|")))
        else:
            found += re.split(r"(?<=\.) (?=[A-Z`])", text)
    return found


def test_every_sentence_is_held_by_tests_that_exist() -> None:
    found = statements((ROOT / "docs/checkpoint-format.md").read_text())
    assert len(found) == len(HELD)
    for sentence, begin in zip(found, HELD, strict=True):
        assert sentence.startswith(begin)
    for name in {name for names in HELD.values() for name in names}:
        file, test = name.split(":")
        room, _, stem = file.rpartition("/")
        (path,) = (ROOT / "tests" / (room or "checkpoint")).rglob(f"test_{stem}.py")
        tree = ast.parse(path.read_text())
        assert f"test_{test}" in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, name


def test_a_step_can_be_read_by_hand(tmp_path: Path) -> None:
    """With json, zlib and the page alone: names, places, checksums and values of everything that two ranks saved."""
    step = save_step(tmp_path, TABLE, Layout(tp=2, dp=2, zero=1), STATES, side_files={"config.json": b"{}"})
    specs = {spec.name: spec for spec in TABLE if not spec.alias}
    manifest = json.loads((step / "manifest.json").read_bytes())
    assert (step / "COMMIT").read_text() == hashlib.sha256((step / "manifest.json").read_bytes()).hexdigest() + "\n"
    assert (manifest["format"], manifest["version"], manifest["step"]) == ("tk", 1, 1)
    assert manifest["aliases"] == {"lm_head.weight": "model.embed_tokens.weight"}
    assert {name: tuple(t["shape"]) for name, t in manifest["tensors"].items()} == {
        n: s.shape for n, s in specs.items()
    }
    assert all(t["slots"] == STATES for t in manifest["tensors"].values())
    names = sorted(specs)
    values = {(name, slot): np.full(spec.shape, np.nan, "<f4") for name, spec in specs.items() for slot in STATES}
    assert sorted(manifest["parts"]) == [f"{rank:05d}.json" for rank in range(4)]
    for name, record in manifest["parts"].items():
        data = (step / "parts" / name).read_bytes()
        assert (record["size"], record["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
        part = json.loads(data)
        assert part["writer"] == int(name[:5])
        assert [names[index] for index in record["tensors"]] == sorted({c["tensor"] for c in part["chunks"]})
        headers = {file: read_header(step / file, known) for file, known in part["files"].items()}
        for chunk in part["chunks"]:
            put(step, chunk, headers[chunk["file"]], values[chunk["tensor"], chunk["slot"]], specs)
    for (name, slot), found in values.items():
        assert found.tobytes() == true_values(specs[name], slot, "F32").tobytes()


def read_header(path: Path, known: dict[str, Any]) -> dict[tuple[int, int], tuple[str, list[int]]]:
    """(begin, end) from the file's start -> name and shape."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    assert (8 + length) % 4096 == 0
    assert known == {"size": len(data), "header_sha256": hashlib.sha256(data[: 8 + length]).hexdigest()}
    header = json.loads(data[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt", "tk": "1"}
    begin = 8 + length
    return {tuple(begin + o for o in e["data_offsets"]): (name, e["shape"]) for name, e in header.items()}


def put(step: Path, chunk: dict[str, Any], header: dict[Any, Any], whole: np.ndarray, specs: dict[str, Any]) -> None:
    """Checks a chunk's checksum and name, and puts its elements where its box and range say."""
    begin, end = chunk["offset"], chunk["offset"] + chunk["nbytes"]
    data = (step / chunk["file"]).read_bytes()[begin:end]
    assert chunk["crc"] == ([zlib.crc32(data)] if data else [])
    stem = "model-" if chunk["slot"] == "weight" else f"optim-{chunk['slot']}-"
    assert chunk["file"].startswith(stem)
    name, shape = header[begin, end]
    extents = [high - low for low, high in chunk["box"]]
    if "flat" not in chunk and extents == list(specs[chunk["tensor"]].shape):
        assert (name, shape) == (chunk["tensor"], extents)
    else:
        assert re.fullmatch(re.escape(f"{chunk['tensor']}@{chunk['slot']}#") + r"\d", name)
        assert shape == ([len(data) // 4] if "flat" in chunk else extents)
    a, b = chunk.get("flat", (0, int(np.prod(extents))))
    place = tuple(slice(low, high) for low, high in chunk["box"])
    box = whole[place].reshape(-1)
    assert np.isnan(box[a:b]).all()
    box[a:b] = np.frombuffer(data, "<f4")
    whole[place] = box.reshape(extents)


def test_a_step_is_saved_in_this_order(tmp_path: Path) -> None:
    log: list[str] = []
    opened: dict[int, str] = {}

    describe: dict[str, Callable[..., str]] = {
        "open_new": lambda path: path.name,
        "fsync": lambda fd: opened[fd],
        "fsync_dir": lambda path: re.sub(r"\.tmp-.*", "", path.name),
        "rename": lambda source, target: target.name,
    }

    def record(name: str, operation: Callable[..., Any], *args: Any) -> Any:
        result = operation(*args)
        if name == "open_new":
            opened[result] = Path(args[0]).name
        log.append(f"{name} {describe[name](*args)}")
        return result

    with watched(record, tuple(describe)):
        step = save_step(tmp_path / "run", TABLE, Layout(), {"weight": "F32"}, side_files={"config.json": b"{}"})
    made = [re.sub(r"\.tmp-\w+", ".tmp", line) for line in log]
    part = ["open_new 00000.json.tmp", "fsync 00000.json.tmp", "rename 00000.json"]
    expected = ["fsync model-00000.safetensors", *part]
    expected += [f"fsync {name}" for name in ("config.json", "manifest.json", "COMMIT")]
    expected += ["fsync_dir parts", f"fsync_dir {step.name}", f"rename {step.name}", "fsync_dir run", "rename LATEST"]
    rest = iter(made)
    assert all(line in rest for line in expected), made
    assert Checkpoint.open(step).verify().ok
