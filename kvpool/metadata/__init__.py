"""Which workers live, which blocks each of them holds, and what they say about their load.

The service's state is soft: the workers are the truth, and whatever it loses they send again by themselves.

1. A worker joins (`publisher`, `link`) with an epoch, its layout fingerprint and hash scheme; the directory (`state`,
   `membership`) refuses what does not match and what is older than what it knows, and grants a membership lease that
   heartbeats on a connection of their own renew.
2. The worker sends a snapshot of its blocks, then numbered batches of changes (`outbox`). A gap, an overflow or a
   directory that restarted has one remedy: another snapshot, which replaces the old content in one step (`index`).
3. Every change is numbered and relayed to the watchers (`service`). A router's copy (`watcher`, `view`) starts from a
   snapshot that is read in parts while changes go on, notices gaps, and goes on with what it knows while no replica
   answers.
4. A lookup (`index`, `masks`) finds the prefix of every worker in one walk along the chain. It pins nothing.
5. A holder that fails a load is hidden at once and offered again after a probe and a growing back-off (`membership`).

Pure: `masks`, `index`, `membership`, `state`, `outbox`, `view`, `events`. `wire` translates to protobuf, `rpc` maps
errors, `security` adds TLS and a token when configured; `service`, `server`, `metrics`, `client`, `link`, `publisher`
and `watcher` are the shells.
"""
