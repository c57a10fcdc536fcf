-- KEYS: all sessions, those of a principal. ARGV: member
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('SREM', KEYS[2], ARGV[1])
return false
