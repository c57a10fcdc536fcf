-- KEYS: all sessions, those of a principal. ARGV: member. The deadline that stood in the first list.
local deadline = redis.call('ZSCORE', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('SREM', KEYS[2], ARGV[1])
return deadline
