-- What a release with version 1 of the state left behind after `potluck up --check`.
BEGIN TRANSACTION;
CREATE TABLE events (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            at_s REAL NOT NULL,
            kind TEXT NOT NULL,
            what TEXT NOT NULL,
            why TEXT NOT NULL
        );
INSERT INTO "events" VALUES(1,1.79481210001597118378e+09,'gateway','listens at http://127.0.0.1:36433','it was not there');
INSERT INTO "events" VALUES(2,1.79481210003688836098e+09,'start','words-b26a1682 for words: mixed 1xL4 tp1@east#0/0','the plan wants it and nobody is there for it');
INSERT INTO "events" VALUES(3,1.79481209987682628632e+09,'brain','plan of auto adopted','$0.80/h');
INSERT INTO "events" VALUES(4,1.79481209987685489655e+09,'brain','words: mixed 1xL4 tp1@east#0/0 is wanted','the plan of auto wants it so');
INSERT INTO "events" VALUES(5,1.7948121000502448082e+09,'brain','scaling','scaling is off');
INSERT INTO "events" VALUES(6,1.79481210216741895676e+09,'up','words-b26a1682','for words: mixed 1xL4 tp1@east#0/0');
INSERT INTO "events" VALUES(7,1.79481210218209862709e+09,'brain','words: mixed 1xL4 tp1@east#0/0 is ready','its engine answers');
INSERT INTO "events" VALUES(8,1.79481210601658987999e+09,'down','all was stopped','somebody asked for it');
CREATE TABLE instances (
            name TEXT PRIMARY KEY,
            make TEXT NOT NULL,
            state TEXT NOT NULL,
            since_s REAL NOT NULL,
            url TEXT NOT NULL DEFAULT '',
            replica TEXT NOT NULL DEFAULT '',
            problem TEXT NOT NULL DEFAULT '',
            pinned INTEGER NOT NULL DEFAULT 0,
            place TEXT NOT NULL DEFAULT ''
        );
CREATE TABLE lease (
            id INTEGER PRIMARY KEY CHECK (id = 1),
            holder TEXT NOT NULL,
            turn INTEGER NOT NULL,
            until_s REAL NOT NULL
        );
INSERT INTO "lease" VALUES(1,'host-25403-fd558983',1,0.0);
CREATE TABLE plans (
            version INTEGER PRIMARY KEY AUTOINCREMENT,
            at_s REAL NOT NULL,
            reason TEXT NOT NULL,
            plan TEXT NOT NULL
        );
INSERT INTO "plans" VALUES(1,1.79481209557091569901e+09,'potluck up','{
 "format": "potluck.plan",
 "version": 1,
 "value": {
  "type": "Plan",
  "strategy": "auto",
  "templates": [
   {
    "type": "Template",
    "name": "words: mixed 1xL4 tp1",
    "kind": "combo",
    "model": "words",
    "nodes": [
     {
      "type": "NodeCount",
      "node": "1xL4",
      "count": 1
     }
    ],
    "replicas": [
     {
      "type": "Replica",
      "role": "mixed",
      "layout": {
       "type": "Layout",
       "stages": [
        {
         "type": "Stage",
         "layers": 32,
         "nodes": [
          {
           "type": "StageNode",
           "node": "1xL4",
           "tp": 1,
           "machine": ""
          }
         ]
        }
       ]
      }
     }
    ],
    "capacity": [
     {
      "type": "BucketCapacity",
      "bucket": 0,
      "prefill_per_s": 0.0,
      "decode_per_s": 0.0,
      "closed_per_s": 13.05649066090812,
      "ttft_s": 0.09326493425914081,
      "tpot_s": 0.09446131930580733
     },
     {
      "type": "BucketCapacity",
      "bucket": 1,
      "prefill_per_s": 0.0,
      "decode_per_s": 0.0,
      "closed_per_s": 7.672350034289301,
      "ttft_s": 0.1106976523660879,
      "tpot_s": 0.0955813186384767
     },
     {
      "type": "BucketCapacity",
      "bucket": 2,
      "prefill_per_s": 0.0,
      "decode_per_s": 0.0,
      "closed_per_s": 4.159131135855824,
      "ttft_s": 0.1818964340240204,
      "tpot_s": 0.09617393319282588
     }
    ],
    "confidence": "transferred",
    "codec": "fp16",
    "flows": []
   }
  ],
  "deployments": [
   {
    "type": "Deployment",
    "template": "words: mixed 1xL4 tp1",
    "region": "east",
    "count": 1
   }
  ],
  "buckets": [
   {
    "type": "Bucket",
    "model": "words",
    "bucket": 0,
    "longest_tokens": 151,
    "rate_per_s": 0.1974867996078363
   },
   {
    "type": "Bucket",
    "model": "words",
    "bucket": 1,
    "longest_tokens": 328,
    "rate_per_s": 0.26351405292087926
   },
   {
    "type": "Bucket",
    "model": "words",
    "bucket": 2,
    "longest_tokens": 516,
    "rate_per_s": 0.03899914747128446
   }
  ],
  "shares": [
   {
    "type": "Share",
    "template": "words: mixed 1xL4 tp1",
    "region": "east",
    "bucket": 0,
    "phase": "closed",
    "rate_per_s": 0.19748679960783633
   },
   {
    "type": "Share",
    "template": "words: mixed 1xL4 tp1",
    "region": "east",
    "bucket": 1,
    "phase": "closed",
    "rate_per_s": 0.26351405292087926
   },
   {
    "type": "Share",
    "template": "words: mixed 1xL4 tp1",
    "region": "east",
    "bucket": 2,
    "phase": "closed",
    "rate_per_s": 0.038999147471284454
   }
  ],
  "flows": [],
  "predictions": [
   {
    "type": "Prediction",
    "model": "words",
    "demand_per_s": 0.5,
    "capacity_per_s": 0.625,
    "ttft_s": 0.10936557252258178,
    "tpot_s": 0.09518517139573052,
    "confidence": "transferred"
   }
  ],
  "cost_usd_per_h": 0.8,
  "gap": 0.0,
  "fraction": 1.0
 }
}
');
CREATE TABLE rates (
            model TEXT NOT NULL,
            bin INTEGER NOT NULL,
            rate_per_s REAL NOT NULL,
            PRIMARY KEY (model, bin)
        ) WITHOUT ROWID;
CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
INSERT INTO "settings" VALUES('controller','{"pid": 25403, "started": 3440476}');
INSERT INTO "settings" VALUES('gateway','null');
INSERT INTO "settings" VALUES('gateway read','{"epoch": "cbb25649f71feaf8", "number": 3, "ended": {}, "counts": {}, "bin": 2991353, "since_s": 1794812100.050287}');
INSERT INTO "settings" VALUES('spec','"230347095c8b8dae"');
INSERT INTO "settings" VALUES('spec files','{"path": "potluck.yaml", "profiles": []}');
INSERT INTO "settings" VALUES('wanted','{"version": 8, "plan_version": 1, "plan_mark": "ee7b8d2b54c21757", "replicas": [{"id": "words: mixed 1xL4 tp1@east#0/0", "unit": "words: mixed 1xL4 tp1@east#0", "template": "words: mixed 1xL4 tp1", "index": 0, "kind": "combo", "model": "words", "role": "mixed", "region": "east", "nodes": ["words: mixed 1xL4 tp1@east#0/1xL4/0"], "zone": "", "draining": false, "url": "http://127.0.0.1:52319"}], "idle": [], "replan": null, "market": null}');
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('plans',1);
INSERT INTO "sqlite_sequence" VALUES('events',8);
COMMIT;
PRAGMA user_version = 1;
