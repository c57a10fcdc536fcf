-- KEYS: subscribers of a resource. ARGV: session, the token that it must have: a newer
-- subscription stays
if redis.call('HGET', KEYS[1], ARGV[1]) == ARGV[2] then
    redis.call('HDEL', KEYS[1], ARGV[1])
end
return false
