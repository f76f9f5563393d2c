//! Compares our declarations of libibverbs's structures with the C header, if it is installed.

use std::fmt::Write as _;
use std::mem::{offset_of, size_of};
use std::path::Path;
use std::process::Command;

use starwire_net::transport::verbs::abi::*;

/// (C expression, expected value)
fn expectations() -> Vec<(String, usize)> {
    let mut all = Vec::new();
    macro_rules! same {
        ($name:ident: $($field:ident),*) => {
            all.push((format!("sizeof(struct {})", stringify!($name)), size_of::<$name>()));
            $(all.push((format!("offsetof(struct {}, {})", stringify!($name), stringify!($field)), offset_of!($name, $field)));)*
        };
    }
    same!(ibv_device: name, dev_name);
    same!(ibv_context: device, ops, cmd_fd, async_fd, num_comp_vectors);
    same!(ibv_context_ops: poll_cq, req_notify_cq, post_send, post_recv);
    same!(ibv_device_attr: max_qp, max_qp_wr, max_cqe, max_qp_rd_atom, max_qp_init_rd_atom, phys_port_cnt);
    same!(ibv_port_attr: state, active_mtu, gid_tbl_len, max_msg_sz, lid, link_layer);
    same!(ibv_gid_entry: gid, gid_index, gid_type);
    same!(ibv_pd: context);
    same!(ibv_mr: addr, lkey, rkey);
    same!(ibv_comp_channel: fd);
    same!(ibv_cq: channel, cq_context, cqe, comp_events_completed);
    same!(ibv_qp_init_attr: send_cq, recv_cq, srq, cap, qp_type, sq_sig_all);
    same!(ibv_qp_cap: max_send_wr, max_inline_data);
    same!(ibv_qp: pd, qp_num, state, qp_type);
    same!(ibv_global_route: dgid, flow_label, sgid_index, hop_limit, traffic_class);
    same!(ibv_ah_attr: grh, dlid, sl, is_global, port_num);
    same!(ibv_qp_attr: qp_state, path_mtu, rq_psn, sq_psn, dest_qp_num, qp_access_flags, ah_attr, pkey_index, max_rd_atomic,
        max_dest_rd_atomic, min_rnr_timer, port_num, timeout, retry_cnt, rnr_retry);
    same!(ibv_sge: addr, length, lkey);
    same!(ibv_send_wr: wr_id, next, sg_list, num_sge, opcode, send_flags, imm_data);
    same!(ibv_recv_wr: wr_id, next, sg_list, num_sge);
    same!(ibv_wc: wr_id, status, opcode, byte_len, qp_num, wc_flags);
    same!(ibv_async_event: event_type);
    let mut pair = |c: &str, ours: i64| all.push((c.to_owned(), ours as usize));
    pair("offsetof(struct ibv_send_wr, wr)", offset_of!(ibv_send_wr, rdma) as i64);
    pair(
        "offsetof(struct ibv_send_wr, wr.rdma.rkey)",
        (offset_of!(ibv_send_wr, rdma) + offset_of!(rdma_target, rkey)) as i64,
    );
    for (c, ours) in [
        ("IBV_QPT_RC", QPT_RC),
        ("IBV_QPS_INIT", QPS_INIT),
        ("IBV_QPS_RTR", QPS_RTR),
        ("IBV_QPS_RTS", QPS_RTS),
        ("IBV_QPS_ERR", QPS_ERR),
        ("IBV_QP_STATE", QP_STATE),
        ("IBV_QP_ACCESS_FLAGS", QP_ACCESS_FLAGS),
        ("IBV_QP_PKEY_INDEX", QP_PKEY_INDEX),
        ("IBV_QP_PORT", QP_PORT),
        ("IBV_QP_AV", QP_AV),
        ("IBV_QP_PATH_MTU", QP_PATH_MTU),
        ("IBV_QP_TIMEOUT", QP_TIMEOUT),
        ("IBV_QP_RETRY_CNT", QP_RETRY_CNT),
        ("IBV_QP_RNR_RETRY", QP_RNR_RETRY),
        ("IBV_QP_RQ_PSN", QP_RQ_PSN),
        ("IBV_QP_MAX_QP_RD_ATOMIC", QP_MAX_QP_RD_ATOMIC),
        ("IBV_QP_MIN_RNR_TIMER", QP_MIN_RNR_TIMER),
        ("IBV_QP_SQ_PSN", QP_SQ_PSN),
        ("IBV_QP_MAX_DEST_RD_ATOMIC", QP_MAX_DEST_RD_ATOMIC),
        ("IBV_QP_DEST_QPN", QP_DEST_QPN),
        ("IBV_ACCESS_LOCAL_WRITE", ACCESS_LOCAL_WRITE),
        ("IBV_ACCESS_REMOTE_READ", ACCESS_REMOTE_READ),
        ("IBV_WR_SEND", WR_SEND),
        ("IBV_WR_RDMA_READ", WR_RDMA_READ),
        ("IBV_WC_RETRY_EXC_ERR", WC_RETRY_EXC_ERR),
        ("IBV_WC_REM_ACCESS_ERR", WC_REM_ACCESS_ERR),
        ("IBV_WC_RNR_RETRY_EXC_ERR", WC_RNR_RETRY_EXC_ERR),
        ("IBV_WC_WR_FLUSH_ERR", WC_WR_FLUSH_ERR),
        ("IBV_PORT_ACTIVE", PORT_ACTIVE),
        ("IBV_EVENT_CQ_ERR", EVENT_CQ_ERR),
        ("IBV_EVENT_QP_FATAL", EVENT_QP_FATAL),
        ("IBV_EVENT_DEVICE_FATAL", EVENT_DEVICE_FATAL),
        ("IBV_LINK_LAYER_ETHERNET", i32::from(LINK_LAYER_ETHERNET)),
    ] {
        pair(c, i64::from(ours));
    }
    pair("IBV_SEND_SIGNALED", i64::from(SEND_SIGNALED));
    all
}

#[test]
fn structures_and_numbers_match_the_c_header() {
    // A folder that contains infiniband/verbs.h, for machines where the header is not installed.
    let include = std::env::var("STARWIRE_TEST_VERBS_INCLUDE").unwrap_or_else(|_| "/usr/include".to_owned());
    if !Path::new(&include).join("infiniband/verbs.h").exists() {
        eprintln!("SKIPPED, NOT TESTED: no infiniband/verbs.h (Debian: libibverbs-dev)");
        return;
    }
    let folder = std::env::temp_dir().join(format!("starwire-verbs-layout-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let mut source = String::from("#include <stddef.h>\n#include <infiniband/verbs.h>\n");
    for (index, (expression, ours)) in expectations().iter().enumerate() {
        writeln!(source, "_Static_assert(({expression}) == {ours}, \"{index}: {expression} is not {ours}\");").unwrap();
    }
    let file = folder.join("layout.c");
    std::fs::write(&file, source).unwrap();
    let output = Command::new("cc").args(["-fsyntax-only", "-I", &include]).arg(&file).output().unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
