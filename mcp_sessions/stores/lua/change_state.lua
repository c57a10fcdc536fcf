-- needs: session
-- ARGV: what changed the subscriptions that are known, whether the client's description is known,
-- how many keys are removed, they, then key and value of each that changed
if redis.call('EXISTS', base) == 0 then
    return false
end
local state, removed = base .. ':s', tonumber(ARGV[3])
for i = 4, 3 + removed do
    redis.call('HDEL', state, ARGV[i])
end
for i = 4 + removed, #ARGV, 2 do
    redis.call('HSET', state, ARGV[i], ARGV[i + 1])
end
share_lifetime(state)
redis.call('HINCRBY', base, 'statev', 1)
return record(ARGV[1], ARGV[2])
