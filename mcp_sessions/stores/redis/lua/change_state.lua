-- needs: session
-- ARGV: what changed the subscriptions that are known, whether the client's description is known,
-- most bytes, version that is expected (empty: any), how many keys are removed, they, then key and
-- value of each that changed
if redis.call('EXISTS', base) == 0 then
    return false
end
if ARGV[4] ~= '' and ARGV[4] ~= (redis.call('HGET', base, 'statev') or '0') then
    return { 'newer', record(ARGV[1], ARGV[2]) }
end
local state, removed = base .. ':s', tonumber(ARGV[5])
local newest = {}
local before = redis.call('HGETALL', state)
for i = 1, #before, 2 do
    newest[before[i]] = #before[i + 1]
end
for i = 6, 5 + removed do
    newest[ARGV[i]] = nil
end
for i = 6 + removed, #ARGV, 2 do
    newest[ARGV[i]] = #ARGV[i + 1]
end
local total = 0
for key, size in pairs(newest) do
    total = total + #key + size
end
if total > tonumber(ARGV[3]) then
    return 'max_state_bytes'
end
for i = 6, 5 + removed do
    redis.call('HDEL', state, ARGV[i])
end
for i = 6 + removed, #ARGV, 2 do
    redis.call('HSET', state, ARGV[i], ARGV[i + 1])
end
share_lifetime(state)
redis.call('HINCRBY', base, 'statev', 1)
return record(ARGV[1], ARGV[2])
